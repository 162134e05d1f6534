"""The parts of any model: its layers and outer modules, found by structure, not by class name."""

from dataclasses import dataclass

from torch import nn

from hybrid.models.modules import hugging_face_model, whole_shape

# Settings with a number of layers, of decoder or encoder.
LAYER_COUNTS = "num_hidden_layers n_layer num_layers encoder_layers decoder_layers num_decoder_layers".split()


@dataclass(frozen=True)
class Part:
    """One module that gets an inference container.  kind: "layer", "embedding", "norm", "head" or "other"."""

    name: str
    module: nn.Module
    kind: str


@dataclass(frozen=True)
class Structure:
    """The parts of a model in forward order: its transformer layers, and the other modules that own parameters."""

    layers: tuple[Part, ...]
    outer: tuple[Part, ...]


def can_generate(module: nn.Module) -> bool:
    """Whether a module has a working `generate` of its own. PEFT's wrappers have one also around classifiers (0.21);
    other wrappers, such as torch.compile's, forward their attributes to the model inside."""
    model = hugging_face_model(module)
    return hasattr(type(model), "generate") or "generate" in vars(model)


def generating_part(model: nn.Module) -> nn.Module:
    """Return the part of `model` that generates: itself, or the only module in it that can, such as the policy in a
    wrapper that also has a value model. `model` if there is none or more than one."""
    generating: list[nn.Module] = []
    within: set[nn.Module] = set()  # an adapter's wrapper can generate, and so can its base: the outermost counts
    for module in model.modules():
        if module not in within and can_generate(module):
            generating.append(module)
            within.update(module.modules())
    return generating[0] if len(generating) == 1 else model


def read_structure(model: nn.Module) -> Structure:
    """Return the transformer layers of `model`, and every module outside them that owns parameters.

    Without a recognised list of layers every part is in `outer`, and the model runs part by part like any other.
    """
    stacks: list[tuple[str, nn.Module]] = []
    within: set[nn.Module] = set()  # a layer may hold lists of its own (T5's sub-layers): the outermost counts
    for name, module in model.named_modules():
        if module not in within and is_layer_stack(model, module):
            stacks.append((name, module))
            within.update(module.modules())
    layers = tuple(
        Part(f"{name}.{index}", layer, "layer") for name, stack in stacks for index, layer in enumerate(stack)
    )
    outer = tuple(
        Part(name, module, kind_of(model, module))
        for name, module in model.named_modules()
        if module not in within and module._parameters
    )
    return Structure(layers, outer)


def is_layer_stack(model: nn.Module, module: nn.Module) -> bool:
    """Whether `module` is the list of a model's transformer layers: a ModuleList with as many entries as the
    configuration has layers, each of which has submodules (expert matrices in a list have none)."""
    if not isinstance(module, nn.ModuleList) or not all(any(entry.children()) for entry in module):
        return False
    config = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    counts = (getattr(source, name, 0) for source in (config, text) for name in LAYER_COUNTS)
    return len(module) > 0 and len(module) in counts


def kind_of(model: nn.Module, module: nn.Module) -> str:
    """`Part.kind` of a module outside the layers that owns parameters."""
    if isinstance(module, nn.Embedding):
        return "embedding"
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if module is head:
        return "head"
    weight = module._parameters.get("weight")
    return "norm" if weight is not None and len(whole_shape(weight)) == 1 else "other"
