"""How much memory the KV of common models takes in a pool: the table of docs/how-to/size.md, computed.

python -m benchmarks.cases.kv_bytes
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_plugin.config import ConnectorConfig
from vllm_plugin.model.kinds import FullAttention, Kind, SlidingWindow
from vllm_plugin.scheduler.stores import Retention

BLOCK_TOKENS = 16
PROMPT_TOKENS = 32_768
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Shape:
    """What the bytes of a model's KV depend on, from its published config.json.

    Args:
        full_layers: layers whose tokens attend to all tokens before them.
        head_values: numbers that one KV head keeps of one token: K and V together.
        window_layers: layers with a sliding window of `window_tokens`.
        element_bytes: 2 for bfloat16 and float16, 1 for fp8.
    """

    full_layers: int
    kv_heads: int
    head_values: int
    window_layers: int = 0
    window_tokens: int = 0
    element_bytes: int = 2

    @property
    def full_bytes(self) -> int:
        """Bytes of one token in the layers of full attention."""
        return self.full_layers * self.kv_heads * self.head_values * self.element_bytes

    @property
    def window_bytes(self) -> int:
        """Bytes of one token in the layers with a window."""
        return self.window_layers * self.kv_heads * self.head_values * self.element_bytes

    def prompt_bytes(self, prompt_tokens: int) -> int:
        """Bytes that storing one prompt takes: every block of full attention, and the windows that are stored."""
        retention = Retention(prompt_tokens, BLOCK_TOKENS, ConnectorConfig().window_interval_tokens)
        num_blocks = prompt_tokens // BLOCK_TOKENS
        kinds: list[tuple[Kind, int]] = [(FullAttention(block_tokens=BLOCK_TOKENS), self.full_bytes)]
        if self.window_layers:
            window = SlidingWindow(block_tokens=BLOCK_TOKENS, reach_tokens=self.window_tokens - 1)
            kinds.append((window, self.window_bytes))
        return sum(
            len(retention.blocks(kind, 0, num_blocks)) * BLOCK_TOKENS * token_bytes for kind, token_bytes in kinds
        )


SHAPES = {
    "Llama 3.1 8B": Shape(32, 8, 256),
    "Llama 3.1 70B": Shape(80, 8, 256),
    "Llama 3.1 405B": Shape(126, 8, 256),
    "Qwen3 8B": Shape(36, 8, 256),
    "Qwen3 32B": Shape(64, 8, 256),
    "Qwen3 30B-A3B": Shape(48, 4, 256),
    "Qwen3 235B-A22B": Shape(94, 4, 256),
    "Mixtral 8x7B": Shape(32, 8, 256),
    "Mixtral 8x22B": Shape(56, 8, 256),
    "gpt-oss-20b": Shape(12, 8, 128, window_layers=12, window_tokens=128),
    "gpt-oss-120b": Shape(18, 8, 128, window_layers=18, window_tokens=128),
    "Gemma 3 27B": Shape(10, 16, 256, window_layers=52, window_tokens=1024),
    "DeepSeek V3, R1 (MLA)": Shape(61, 1, 512 + 64),
}


def table() -> str:
    """The table, in Markdown."""
    lines = [
        f"| model, KV in bfloat16 | a token, full attention | a token, windows | a prompt of {PROMPT_TOKENS:,} tokens "
        f"| such prompts in 256 GiB |",
        "|---|---|---|---|---|",
    ]
    for name, shape in SHAPES.items():
        windows = f"{shape.window_bytes / KIB:.1f} KiB x {shape.window_tokens:,}" if shape.window_layers else ""
        prompt = shape.prompt_bytes(PROMPT_TOKENS)
        lines.append(
            f"| {name} | {shape.full_bytes / KIB:.1f} KiB | {windows} | {prompt / GIB:.2f} GiB "
            f"| {256 * GIB // prompt:,} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
