"""A virtual GPU: torch's CPU build with tensors on "cuda"; see README.md. Import `library` alone without torch."""
