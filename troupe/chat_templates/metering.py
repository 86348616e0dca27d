"""The work of a chat template: what is counted, and the calls in the template that count it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from jinja2 import nodes
from jinja2.runtime import Undefined
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from troupe.chat_templates import TemplateLimitError

# Bounds on one rendering. Work is counted in units of about 10 ns; a conversation adds to it.
_WORK: Final = 30_000_000
_WORK_PER_CHAR: Final = 200
NODE_WORK: Final = 10
BODY_WORK: Final = 100
CALL_WORK: Final = 400
# The largest text or list that a template may make, beyond the conversation's own.
_VALUE: Final = 1 << 20
_VALUE_PER_CHAR: Final = 4
# Bytes that a character or an item of a list may take, as work for making it.
MADE: Final = 4
# The same for an item of a list of texts that are made with it.
LISTED: Final = 32


class Meter:
    """Counts the work of one rendering."""

    def __init__(self) -> None:
        self.work = self.value = 0

    def start(self, chars: int) -> None:
        """Begin a rendering of a conversation with so many characters."""
        self.work = _WORK + _WORK_PER_CHAR * chars
        self.value = _VALUE + _VALUE_PER_CHAR * chars

    def charge(self, units: int) -> None:
        self.work -= units
        if self.work < 0:
            raise TemplateLimitError("it does too much work: too many steps, or too long texts")

    def make(self, what: str, size: int) -> None:
        """Count a text or list of at most `size` characters or items before it is made."""
        if size > self.value:
            raise TemplateLimitError(
                f"{what} would make {size} characters or items, and {self.value} are the most"
                if size < 10**30
                else f"{what} would make a value of more than {self.value} characters or items"
            )
        self.charge(MADE * size)

    def step(self, value: Any, units: int) -> Any:
        """Count the execution of a body of statements."""
        if type(units) is not int or units <= 0:  # a template that calls the filter itself
            raise TemplateLimitError("it calls a filter that is not offered")
        self.charge(units)
        return value

    def read(self, value: Any, *, as_text: bool = False) -> int:
        """The size of `value` with all that it holds; counts the work of reading it.

        `as_text`: it is shown or written; raises for objects whose text has no bound.
        """
        if isinstance(value, str):
            size = len(value) + 1
            self.charge(size)
            return size
        size, stack = 0, [value]
        while stack:
            one = stack.pop()
            if isinstance(one, str):
                added = len(one) + 4
            elif isinstance(one, Mapping):
                added = 4 + 4 * len(one)
                stack += one.keys()
                stack += one.values()
            elif isinstance(one, _ITEMS):
                added = 4 + 2 * len(one)
                stack += one
            elif isinstance(one, range):  # a call may walk through it
                added = 8 * len(one)
            elif isinstance(one, Namespace) and as_text:
                raise TemplateLimitError("it shows a namespace as text")
            else:  # numbers, and objects with a short text
                added = 16 + (one.bit_length() // 3 if type(one) is int else 0)
            size += added
            self.charge(added + NODE_WORK)
            if size > self.value:
                raise TemplateLimitError(f"a value has more than {self.value} characters or items")
        return size

    def each(self, items: Iterable[Any], units: int = BODY_WORK) -> Iterator[Any]:
        """The items of an iterator that a filter takes or returns, each counted as `units`."""
        for item in items:
            self.charge(units)
            yield item

    def listed(self, value: Any) -> Any:
        """Return the items of an iterator as a list, which has a size; other values unchanged."""
        return list(self.each(value)) if isinstance(value, Iterator) else value

    def shown(self, value: Any) -> Any:
        """Count what `{{ value }}` writes."""
        if type(value) is str:
            self.charge(MADE * len(value))
        else:
            self.make("a text", self.read(value, as_text=True))
        return value

    def concat(self, *values: Any) -> str:
        """The operator `~`."""
        self.make("`~`", sum(self.read(one, as_text=True) for one in values))
        return "".join(map(str, values))

    def made(self, value: Any) -> Any:
        """Count a literal of a list, tuple or mapping, whose items may be lists in turn."""
        self.charge(MADE * self.read(value))
        return value

    def sliced(self, value: Any) -> Any:
        """Count a slice."""
        if isinstance(value, str | list | tuple):
            self.charge(MADE * len(value))
        return value

    def compared(self, value: Any) -> Any:
        """Count an operand of a comparison."""
        self.read(value)
        return value

    def searched(self, value: Any) -> Any:
        """Count the right operand of `in`."""
        if type(value) is dict:
            return value
        value = self.listed(value)
        if not isinstance(value, Mapping):
            self.read(value)
        return value

    def key(self, value: Any) -> Any:
        """Check a computed key or index: to hash a tuple takes as long as it is large."""
        if not isinstance(value, str | int | float | Undefined | None):
            raise TemplateLimitError(f"it uses a {type(value).__name__} as a key")
        return value

    def template_filters(self) -> dict[str, Callable[..., Any]]:
        """The functions that `Counting` calls, by the name of the filter that calls them."""
        return {
            "troupe_step": self.step,
            "troupe_concat": self.concat,
            "troupe_made": self.made,
            "troupe_sliced": self.sliced,
            "troupe_compared": self.compared,
            "troupe_searched": self.searched,
            "troupe_key": self.key,
        }


_VIEWS: Final[tuple[type[Any], ...]] = (type({}.keys()), type({}.values()), type({}.items()))
_ITEMS: Final[tuple[type[Any], ...]] = (list, tuple, *_VIEWS)


class Counting(NodeTransformer):
    """Adds to a parsed template the calls that count its work: at the head of every body that can
    run more than once, and around expressions whose time depends on the size of their operands."""

    def template(self, tree: nodes.Template) -> None:
        self.generic_visit(tree)
        self._count(tree)

    def _count(self, node: Any) -> None:
        units = _weight(node.body)
        call = _call("troupe_step", nodes.Const(None), nodes.Const(units))
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))

    def _with_body(self, node: Any) -> Any:
        self.generic_visit(node)
        self._count(node)
        return node

    visit_Macro = visit_CallBlock = visit_FilterBlock = visit_Block = _with_body  # noqa: N815

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self._with_body(node)
        if node.test is not None:  # runs for items that do not reach the body
            units = _weight([node.test])
            step = _call("troupe_step", nodes.Const(True), nodes.Const(units))
            node.test = nodes.And(step, node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("troupe_concat", *node.nodes)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        operands = [node.expr, *(one.expr for one in node.ops)]
        plain = any(_is_short(one) for one in operands) and len(operands) == 2
        for one in node.ops:
            if one.op in ("in", "notin"):
                one.expr = _call("troupe_searched", one.expr)
            elif not plain:
                one.expr = _call("troupe_compared", one.expr)
        if not plain:
            node.expr = _call("troupe_compared", node.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _call("troupe_sliced", node) if node.ctx == "load" else node
        if not isinstance(node.arg, nodes.Const):
            node.arg = _call("troupe_key", node.arg)
        return node

    def _literal(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        stored = getattr(node, "ctx", "load") != "load"
        found: nodes.Node = node if stored or not node.items else _call("troupe_made", node)
        return found

    visit_List = visit_Tuple = visit_Dict = _literal  # noqa: N815


def _call(name: str, value: Any, *more: Any) -> nodes.Filter:
    return nodes.Filter(value, name, list(more), [], None, None, lineno=value.lineno or 1)


def _is_short(node: nodes.Node) -> bool:
    """Whether a comparison with the node takes no time that depends on the other operand."""
    return isinstance(node, nodes.Const) and not (isinstance(node.value, str) and node.value == "")


def _weight(body: Sequence[nodes.Node]) -> int:
    """Work of running a body once, without the bodies in it that count their own."""
    units, stack = BODY_WORK, list(body)
    while stack:
        node = stack.pop()
        units += NODE_WORK
        if isinstance(node, nodes.TemplateData):
            units += len(node.data)
        elif isinstance(node, nodes.Const) and isinstance(node.value, str):
            units += len(node.value)
        children = node.iter_child_nodes()
        if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block):
            children = node.iter_child_nodes(exclude=("body",))
        stack += children
    return units
