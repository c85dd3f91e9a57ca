"""Problems to learn from and to be tested on: generated or read from files, and as token ids."""
