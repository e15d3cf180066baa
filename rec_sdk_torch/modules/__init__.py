"""Users build models of these: collections, their configs and the tables' handles. Needs torchrec."""
