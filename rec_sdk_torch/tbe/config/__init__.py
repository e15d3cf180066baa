"""Configuration of tables: configs, lifecycle rules, cache sizes and optimizers. Imports no other subpackage of tbe."""
