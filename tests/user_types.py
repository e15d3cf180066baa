"""Types as a user's type checker sees them: `make lint` fails if a wrong line here is not reported as an error."""

from rec_sdk_torch import NoSuchName, TableConfig  # type: ignore[attr-defined]

NoSuchName()
TableConfig("t", num_embeddings="many", embedding_dim=4)  # type: ignore[arg-type]
