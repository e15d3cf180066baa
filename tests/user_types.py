"""Types as seen by the type checker of a user's program: `make lint` fails if a wrong line here is no error."""

from rec_sdk_torch import NoSuchName, TableConfig  # type: ignore[attr-defined]

NoSuchName()
TableConfig("t", num_embeddings="many", embedding_dim=4)  # type: ignore[arg-type]
