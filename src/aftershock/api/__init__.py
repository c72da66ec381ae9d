"""capture, Path, Change, Response: where tensors become labelled data."""
