"""Questions into token ids, and responses back into text."""

from typing import Any

from fnppo.types import PaddedBatch


def encode(tokenizer: Any, text: str) -> list[int]:
    """The question as the user's turn of a chat, where the model has a chat template."""
    if tokenizer.chat_template is None:
        return list(tokenizer(text)["input_ids"])
    chat = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"])


def decode(tokenizer: Any, batch: PaddedBatch) -> list[str]:
    """The responses as text."""
    rows = zip(batch.input_ids, batch.loss_mask, strict=True)
    return [tokenizer.decode(ids[learned], skip_special_tokens=True) for ids, learned in rows]
