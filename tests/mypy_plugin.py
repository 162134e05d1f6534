"""A mypy plugin: attribute and return types that the annotations of torch, DeepSpeed and transformers lack."""

from collections.abc import Callable

from mypy.nodes import MDEF, SymbolTableNode, Var
from mypy.plugin import AttributeContext, ClassDefContext, MethodContext, Plugin
from mypy.types import AnyType, Type, TypeOfAny

# What DeepSpeed's ZeRO sets on parameters, and transformers on those that it has initialized.
PARAMETER_ATTRIBUTES = (
    "all_gather ds_id ds_numel ds_persist ds_process_group ds_shape ds_status ds_tensor final_location partition "
    "_hp_mapping _is_hf_initialized"
).split()
UNKNOWN_MEMBER = "torch.nn.modules.module.Module."
# Methods of tokenizers whose result depends on the type of the argument, which transformers declares as a union.
TOKENIZER = "transformers.tokenization_utils_base.PreTrainedTokenizerBase"
OF_ANY_TYPE = {f"{TOKENIZER}.{name}" for name in ("apply_chat_template", "convert_ids_to_tokens", "decode")}


class TorchPlugin(Plugin):
    def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        return member_type if fullname.startswith(UNKNOWN_MEMBER) else None

    def get_customize_class_mro_hook(self, fullname: str) -> Callable[[ClassDefContext], None] | None:
        return add_parameter_attributes if fullname == "torch._tensor.Tensor" else None

    def get_method_hook(self, fullname: str) -> Callable[[MethodContext], Type] | None:
        return any_type if fullname in OF_ANY_TYPE else None


def any_type(context: MethodContext) -> Type:
    return AnyType(TypeOfAny.special_form)


def member_type(context: AttributeContext) -> Type:
    """Any for what `Module.__getattr__` gives: torch says `Tensor | Module`, and most of what is read here, such as a
    model's config or a layer's head_dim, is neither. What a class declares keeps its type."""
    is_undeclared = str(context.default_attr_type) == "torch._tensor.Tensor | torch.nn.modules.module.Module"
    return AnyType(TypeOfAny.special_form) if is_undeclared else context.default_attr_type


def add_parameter_attributes(context: ClassDefContext) -> None:
    """PARAMETER_ATTRIBUTES, of any type."""
    tensor = context.cls.info
    for name in PARAMETER_ATTRIBUTES:
        variable = Var(name, AnyType(TypeOfAny.explicit))
        variable.info, variable._fullname = tensor, f"{tensor.fullname}.{name}"
        tensor.names[name] = SymbolTableNode(MDEF, variable, plugin_generated=True)


def plugin(version: str) -> type[Plugin]:
    return TorchPlugin
