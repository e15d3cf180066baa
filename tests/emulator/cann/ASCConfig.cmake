# Stands in for CANN's own: the language ASC, whose compiler is bisheng.py.
list(APPEND CMAKE_MODULE_PATH "${CMAKE_CURRENT_LIST_DIR}")
