"""What each family of Hugging Face models says in its configuration, read into our facts and written from them."""
