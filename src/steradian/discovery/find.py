"""find_groups: from a model and a batch to its rows, in at most thirteen passes.

A row has ⟨∇L, x⟩ = 0 at every point, up to what a normalization's ε does. When the row grows, a defect due to ε is
divided by the square of the factor, and any other is not: the line between "invariant up to ε" and "not invariant".
"""

import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from steradian.discovery import thresholds
from steradian.discovery.explain import assemble, in_words
from steradian.discovery.judge import judge, verify, verify_pairs
from steradian.discovery.measurements import Measurements
from steradian.discovery.pairs import find_pairs
from steradian.discovery.probe import Prober, Reading
from steradian.discovery.sandbox import name_inputs, tensors_in
from steradian.groups import Groups, bare, is_flattened, is_sharded, parameters_of, unwrap

__all__ = ["find_groups"]

_ON_A_COPY = (
    "call it on a whole copy of the model, on a CPU for example, save the result with groups.save(path), and "
    "Groups.load(path, model) gives it for this model"
)


def find_groups(
    model: nn.Module, /, *inputs: Any, progress: Callable[[int, int], object] | None = None, **named_inputs: Any
) -> Groups:
    """The radially invariant rows of a model, proved on the model itself (Lemma 1).

    A slice x of a parameter is a row if ⟨∇L(x), x⟩ = 0 for random inputs, losses and scales of the parameters,
    and then f(ρx) = f(x). Any architecture will do: no layer is recognized by its name. The model is left as
    it was: parameters, buffers, gradients, generators, flags and hooks.

    Args:
        model: an eager module, possibly compiled or data-parallel. One in eval mode is probed in training mode,
            because that is where its rows are used; batch normalization is not invariant in eval mode. A model
            in training mode is probed as it is, with the submodules that it keeps in eval mode.
        *inputs: an example batch, as the model's forward takes it; at least three samples for batch normalization.
        progress: called as progress(done, total) after each pass, where total is what is expected and may grow. By
            default a bar appears if stderr is a terminal and it takes longer than a few seconds.
        **named_inputs: the same by keyword.

    Returns:
        The rows, the rest and the reasons; see `Groups`.

    Raises:
        TypeError: model is not an eager `nn.Module`, or forward takes the items of a dict by keyword.
        ValueError: no parameters, inputs on the wrong device, NaN outputs, no differentiable output.
        RuntimeError: the model raises on these inputs.
        torch.OutOfMemoryError: a pass in float64 does not fit into the device's memory.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    >>> groups = find_groups(model, torch.randn(4, 3, 8, 8))
    >>> groups.layouts, groups.no_effect
    ({'0.weight': 'filter'}, ['0.bias'])
    """
    _check_model(model)
    model = unwrap(model)  # a data-parallel module would synchronize gradients
    if not any(p.requires_grad for p in model.parameters()):
        return Groups(parameters_of(model), frozen=list(parameters_of(model)))
    with torch.inference_mode(False), nullcontext(progress) if progress else _bar() as report:
        prober = Prober(model, inputs, named_inputs, report)  # runs the model in the sandbox
        measured = Measurements(prober, _first_pass(prober))  # at the model's own weights
        measured.probe_random_points()  # candidates: ⟨∇L, x⟩ = 0 up to what ε may do
        measured.probe_grown_points()  # what is left of ⟨∇L, x⟩ falls as ε does, or the candidate is refuted
        verdict = judge(measured)  # the finest rows, of one parameter or of several together
        verdict = verify(measured, verdict)  # f(ρx) = f(x)
        pairs = verify_pairs(measured, find_pairs(measured, verdict.no_effect))  # f(αa, b/α) = f(a, b)
        report(prober.forwards, prober.forwards)
        return assemble(measured, verdict, pairs)  # with the layer in which ρ disappears


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            which = f"the submodule {name!r}" if name else "model"
            raise TypeError(f"{which} is a TorchScript module, whose tensors cannot be swapped; pass the eager module")
    parameters = parameters_of(model)
    if not parameters:
        raise ValueError(f"the model ({type(model).__name__}) has no parameters, so there is nothing to group")
    for name, parameter in parameters.items():
        if is_lazy(parameter):
            problem = "not initialized yet; run the lazy model once on a batch first"
        elif parameter.is_meta:
            problem = f"on the meta device, without values; call model.to_empty first, or {_ON_A_COPY}"
        elif parameter.requires_grad and parameter.layout != torch.strided:
            problem = "sparse, and rows are cut from dense tensors; pass the dense parameter"
        elif is_flattened(parameter):
            problem = (
                "a piece of a tensor that FullyShardedDataParallel flattened, without rows; shard with fully_shard, "
                "after the rows are found"
            )
        elif is_sharded(parameter):
            problem = (
                "sharded over several processes; call find_groups before fully_shard, then groups.of(model) gives the "
                f"rows of the sharded parameters; or {_ON_A_COPY}"
            )
        else:
            continue
        raise ValueError(f"parameter {name!r} is {problem}")


@contextmanager
def _bar() -> Iterator[Callable[[int, int], object]]:
    """A progress bar on a terminal, from the first pass on that ends after a few seconds."""
    console = Console(stderr=True)
    bar = Progress(console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
    task, started = bar.add_task("find_groups", total=None), time.monotonic()

    with ExitStack() as stack:

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)
            late = time.monotonic() - started > thresholds.BAR_SECONDS
            if late and console.is_terminal and not bar.live.is_started:
                stack.enter_context(bar)

        yield report


def _first_pass(prober: Prober) -> Reading:
    """One pass at the model's own weights; raises clear errors for inputs and outputs that cannot be used."""
    if any(t.is_meta for t in tensors_in((prober.args, prober.kwargs))):
        raise ValueError("an input is on the meta device and has no values; pass tensors with values")
    reading = _try_precisions(prober)
    if reading.outputs and not any(t.numel() for t in reading.outputs):
        raise ValueError("the model's output holds no numbers on these inputs; pass a batch with at least two samples")
    if not prober.backwards:
        what = "no floating-point tensor" if not reading.outputs else "no tensor that requires a gradient"
        raise ValueError(
            f"the model's output holds {what}, so no derivative can be taken; return the floating-point outputs that "
            "the loss is computed from, without detach() or torch.no_grad()"
        )
    if not reading.finite:
        nan = any(bool(t.isnan().any()) for t in reading.outputs)
        what = "output contains NaN" if nan else "gradients are not finite"
        raise ValueError(
            f"the model's {what} on these inputs, so nothing can be measured; check the inputs for NaN and infinities "
            "and the parameters for divergence"
        )
    return reading


def _try_precisions(prober: Prober) -> Reading:
    """In float64 if the model can, else in its own dtypes; float32 is better than half precision, though."""
    small: dict[str, None] = {}  # batch normalizations of two values per channel

    def check(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and module.training and args[0].ndim > 1 and args[0].numel() == 2 * args[0].shape[1]:
            small[bare(name)] = None

    batch_norms = [(name, module) for name, module in prober.model.named_modules() if isinstance(module, _BatchNorm)]
    prober.use(None)  # a pass in the model's own dtypes fills caches of the user's, which must not be in float64
    prober.attempt(prober.own, seed=0, backward=False)
    prober.raised = None  # the passes below tell
    half = any(p.dtype in (torch.float16, torch.bfloat16) for p in prober.parameters.values())
    for dtype in (torch.float64, torch.float32, None) if half else (torch.float64, None):
        try:
            prober.use(dtype)
            with ExitStack() as stack:
                for name, module in batch_norms:
                    stack.callback(module.register_forward_pre_hook(partial(check, name)).remove)
                reading = prober.read(prober.own, seed=0)
        except torch.OutOfMemoryError as error:
            error.add_note("find_groups runs the model in float64, which takes twice its memory: pass a smaller batch")
            raise
        except Exception as error:  # what fails in one dtype may work in another
            raised = error
            continue
        if small:
            prober.remarks.append(
                "batch normalization of two values per channel keeps nothing but their order, so that weights in front "
                f"of it have no effect to measure; pass a larger batch: {', '.join(small)}"
            )
        return reading
    raise _in_plain_words(prober, raised) from raised


def _in_plain_words(prober: Prober, error: Exception) -> Exception:
    """What the model raised on the inputs, as an error that says what to do."""
    model_on = {str(p.device) for p in prober.model.parameters()}
    inputs_on = {str(t.device) for t in tensors_in((prober.args, prober.kwargs))}
    if inputs_on and not inputs_on <= model_on:
        return ValueError(
            f"the inputs are on {', '.join(sorted(inputs_on))} but the model is on {', '.join(sorted(model_on))}; "
            f"move the inputs with .to({sorted(model_on)[0]!r})"
        )
    for position, value in enumerate(prober.args):
        kind, others = type(value).__name__, (*prober.args[:position], *prober.args[position + 1 :])
        if isinstance(value, Mapping):
            try:  # whether forward takes its items by keyword
                inspect.signature(prober.model.forward).bind(*others, **value, **prober.kwargs)
            except (TypeError, ValueError):
                if not isinstance(error, TypeError | AttributeError) or kind not in str(error):
                    continue
            name = name_inputs(prober.model, prober.args)[position] or f"number {position + 1}"
            return TypeError(
                f"the model does not take a {kind} as its argument {name}: it raised {in_words(error)}; "
                f"pass the items of the {kind} by keyword: find_groups(model, **batch)"
            )
    before = "" if prober.model.training else "find_groups uses training mode: after model.train(), "
    hint = f"{before}call the model on these inputs yourself to see where"
    if "more than 1 value per channel" in str(error):
        hint = "batch normalization needs more than one sample: pass a larger batch"
    elif "inputs_embeds" in str(error):  # a model of transformers without its tokens, or its decoder without them
        hint = "pass a batch of your data collator, with labels: find_groups(model, **batch)"
    elif "scalar types: Long, Int" in str(error):
        hint = "an embedding takes token ids: pass whole numbers (steradian inspect: --input 4x64:32000)"
    return RuntimeError(f"on these inputs the model raised {in_words(error)}; {hint}")
