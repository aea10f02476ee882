"""From a Hugging Face config.json to a spec.

What a `model_type` means is data: model_specs/hub/<model_type>.yaml.j2 is a spec with holes. The code here reads the config in
both of its dialects, records every key that a hole asks for, renders the file, leaves out what the model does not have, and
refuses - all at once - the keys and values that nothing asked for.
"""
from mkgen.importing.importer import Imported, ImportRefused, import_config, import_hf

__all__ = ["ImportRefused", "Imported", "import_config", "import_hf"]
