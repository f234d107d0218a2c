"""Which form of message content a chat template reads: one string, or a list of parts."""

import functools
import re
from typing import Literal

import jinja2
import jinja2.ext
from jinja2 import nodes

ContentFormat = Literal["string", "openai"]


@functools.lru_cache(maxsize=32)
def detect_content_format(template: str) -> ContentFormat:
    """Parts of content, as OpenAI has them, if the template loops over them; else one string."""
    # Tags that mark words for training take no part in this, and are not Jinja's own.
    source = re.sub(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}", "", template)
    environment = jinja2.Environment(extensions=[jinja2.ext.loopcontrols])
    try:
        tree = environment.parse(source)
    except jinja2.TemplateError:
        return "string"
    return "openai" if _ContentNames(tree).is_looped_over() else "string"


class _ContentNames:
    """The names that a template gives to the message list, to a message, and to a message's content."""

    def __init__(self, tree: nodes.Template) -> None:
        self.tree = tree
        self.lists = {"messages"}
        self.messages: set[str] = set()
        self.contents: set[str] = set()
        size = -1
        while size != (size := len(self.lists) + len(self.messages) + len(self.contents)):
            self._follow_assignments()
            self._follow_macros()

    def is_looped_over(self) -> bool:
        """Whether some loop runs over a message's content."""
        return any(self._is_content(loop.iter) for loop in self.tree.find_all(nodes.For))

    def _follow_assignments(self) -> None:
        for assignment in self.tree.find_all(nodes.Assign):
            if isinstance(assignment.target, nodes.Name):
                self._name(assignment.target.name, assignment.node)
        for loop in self.tree.find_all(nodes.For):
            if isinstance(loop.target, nodes.Name) and self._is_list(loop.iter):
                self.messages.add(loop.target.name)

    def _follow_macros(self) -> None:
        macros = {macro.name: macro for macro in self.tree.find_all(nodes.Macro)}
        for call in self.tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name in macros:
                for parameter, argument in zip(macros[call.node.name].args, call.args, strict=False):
                    self._name(parameter.name, argument)

    def _name(self, name: str, value: nodes.Node) -> None:
        if self._is_list(value):
            self.lists.add(name)
        elif self._is_message(value):
            self.messages.add(name)
        elif self._is_content(value):
            self.contents.add(name)

    def _is_list(self, node: nodes.Node) -> bool:
        node = _strip_filters(node)
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return self._is_list(node.node)
        return isinstance(node, nodes.Name) and node.name in self.lists

    def _is_message(self, node: nodes.Node) -> bool:
        node = _strip_filters(node)
        if isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice):
            return self._is_list(node.node)
        return isinstance(node, nodes.Name) and node.name in self.messages

    def _is_content(self, node: nodes.Node) -> bool:
        node = _strip_filters(node)
        if isinstance(node, nodes.Getattr) and node.attr == "content":
            return self._is_message(node.node)
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content":
            return self._is_message(node.node)
        return isinstance(node, nodes.Name) and node.name in self.contents


def _strip_filters(node: nodes.Node) -> nodes.Node:
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    return node
