"""Text from a prompt through the generated kernel: tokenizer, checkpoint, pack, module, steps."""
