"""What turns text into tokens: trained here, given as a file, or bytes as they are."""
