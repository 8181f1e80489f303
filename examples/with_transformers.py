"""transformers: a language model with random weights, Trainer with one of our optimizers, and a callback that watches.

    python examples/with_transformers.py
    python examples/with_transformers.py --steps 120 --resume               # continues from the last checkpoint
    python examples/with_transformers.py --device cuda --bf16 --hidden 512 --layers 8 --steps 2000

The text is generated: sums such as "27+35=62.", which a model can learn to complete. Records, checkpoints and page.html
are written under --out. Needs the extras "lab" and "transformers", and a transformers that has Gemma 3 (4.50).
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Trainer, TrainingArguments

import steradian as st
from steradian.watching.callbacks.transformers import WatchCallback

LETTERS = "0123456789+=."
LENGTH = 36


class Sums(Dataset):
    """Lines of random sums, each letter one token."""

    def __init__(self, count: int, seed: int) -> None:
        pairs = torch.randint(10, 50, (count, LENGTH // 9, 2), generator=torch.Generator().manual_seed(seed)).tolist()
        lines = ["".join(f"{a}+{b}={a + b:02d}." for a, b in line) for line in pairs]
        self.tokens = torch.tensor([[LETTERS.index(letter) for letter in line] for line in lines])

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, k: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[k], "labels": self.tokens[k]}


def main() -> None:
    """Train, watch, and write the page."""
    args = arguments()
    torch.manual_seed(args.seed)
    model = network(args.hidden, args.layers).to(args.device)
    train, test = Sums(4096, seed=1), Sums(64, seed=2)

    # Heads of queries and keys are normalized one by one, so each is a row. Gemma also normalizes the outputs of
    # attention and MLP, so most of the other matrices are rows as a whole. All of this is measured on the model.
    groups = st.find_groups(model, input_ids=test.tokens[:8].to(args.device))
    print(groups, "\n")

    # Decoupled weight decay as in AdamW, and none for gains and embeddings, which are not rows.
    params = groups.param_groups(weight_decay=0.1, rest={"weight_decay": 0.0})
    options = {"lr": args.lr, "betas": (0.9, 0.95), "without": "ab", "decoupled_weight_decay": True}

    run = args.out / "adam-ab"
    watching = WatchCallback(groups, to=run, every=args.every)
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=str(args.out / "checkpoints"),
            max_steps=args.steps,
            per_device_train_batch_size=args.batch,
            warmup_steps=5,
            lr_scheduler_type="constant_with_warmup",
            logging_steps=5,
            eval_strategy="steps",
            eval_steps=20,
            save_steps=20,
            save_total_limit=1,
            use_cpu=args.device == "cpu",
            bf16=args.bf16,
            dataloader_pin_memory=args.device != "cpu",
            report_to=[],
            disable_tqdm=True,
            seed=args.seed,
        ),
        train_dataset=train,
        eval_dataset=test,
        # With "params" the trainer makes the optimizer from these groups and not from its own; the schedule is its own.
        optimizer_cls_and_kwargs=(st.optim.Adam, {"params": params, **options}),
        callbacks=[watching],
    )
    trainer.train(resume_from_checkpoint=args.resume or None)

    if trainer.is_world_process_zero():
        print(f"\n{watching.watch.summary()}\n")
        # The same as `steradian report RUN --out PAGE`, which also takes several runs and compares them.
        print(f"The page: {st.report([run], args.out / 'page.html')}")


def network(hidden: int, layers: int) -> Gemma3ForCausalLM:
    """A Gemma 3 of any size, with random weights."""
    config = Gemma3TextConfig(
        vocab_size=len(LETTERS),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=LENGTH,
        use_cache=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Gemma3ForCausalLM(config)


def arguments() -> argparse.Namespace:
    """What can be chosen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--hidden", type=int, default=64, help="a multiple of 8")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--every", type=int, default=5, help="watch one in so many steps")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--bf16", action="store_true", help="train in bfloat16, with float32 weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/transformers"))
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --out")
    return parser.parse_args()


if __name__ == "__main__":
    main()
