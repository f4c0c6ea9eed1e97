"""What is run against a target, one folder per kind of question. Nothing here holds logic of its own."""
