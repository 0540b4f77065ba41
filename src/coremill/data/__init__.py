"""From text to packed rows on disk, and the loader that walks them in an order of its own."""
