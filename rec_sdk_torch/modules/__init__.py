"""What users build models of: collections, their configs and the tables' handles. Needs torchrec."""
