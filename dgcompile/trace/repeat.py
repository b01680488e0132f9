"""A deep model from a shallow trace: each kind of layer is traced once and repeated in the ONNX graph.

Layers of one kind differ in their weights, their cache and nothing else, so tracing all of them finds the same nodes
again and again. What is traced is a model with the first layer, one layer of each kind, and the last layer; then the
layers in between are copied until the graph has the depth of the real model. The first and the last stay as traced:
the first reads embeddings, and the last one's output feeds nothing in the encoder.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import onnx_ir as ir

from dgcompile.contract import GraphName, graph_inputs, graph_outputs, past_names, present_names
from dgcompile.errors import TraceError
from dgcompile.model_spec import ModelSpec
from dgcompile.recipe import ActivationDType
from dgcompile.weights_store import Store

_LAYER = re.compile(r"\b(layers|hidden_states|past_key_values|present)\.(\d+)\b")
"""A layer's number in the name of a weight, a value or a node."""


def representative_layers(spec: ModelSpec) -> tuple[int, ...]:
    """The layers of a model that stand for all: the first, one of each kind between, the last, by their numbers.

    All layers, where that would not be fewer.
    """
    last = spec.num_hidden_layers - 1
    kinds = {layer: number for number, layer in reversed(list(enumerate(spec.layers))) if 0 < number < last}
    chosen = (0, *sorted(kinds.values()), last)
    return chosen if len(chosen) <= last else tuple(range(last + 1))


def shallow_config(config: Mapping[str, Any], layers: tuple[int, ...]) -> dict[str, Any]:
    """``config.json`` of a model that has only these layers of the given one.

    Args:
        config: the parsed file, in either form.
        layers: numbers of the layers that stay.
    """
    shallow = copy.deepcopy(dict(config))
    text = shallow["text_config"]
    text["num_hidden_layers"] = len(layers)
    text["layer_types"] = [text["layer_types"][number] for number in layers]
    given = text.get("per_layer_config")
    if given:
        by_number = {int(key): entry for key, entry in given.items()}
        width = len(str(len(layers) - 1))  # transformers pads them, so that they sort
        text["per_layer_config"] = {
            f"{place:0{width}}": by_number[number] for place, number in enumerate(layers) if number in by_number
        }
    return shallow


def repeat_layers(
    graph: GraphName,
    model: ir.Model,
    layers: tuple[int, ...],
    spec: ModelSpec,
    dtype: ActivationDType,
    store: Store,
) -> None:
    """Turns the graph of the shallow model into that of the whole one, in place.

    Args:
        graph: which graph it is.
        model: the shallow model's graph, with weights as references and ``hidden_states.{i}`` named.
        layers: which layer of the whole model each of its layers is, from :func:`representative_layers`.
        spec: the whole model.
        dtype: of the activations.
        store: where the whole model's weights lie.

    Raises:
        TraceError: a layer is tied to others by more than its hidden states, so it cannot be repeated.
    """
    if len(layers) == spec.num_hidden_layers:
        return
    values = {value.name: value for value in _values(model.graph) if value.name}
    templates = [_Layer(number, model.graph, values) for number in range(1, len(layers) - 1)]
    _check_apart(templates, model.graph)
    by_kind = {spec.layers[layers[template.number]]: template for template in templates}

    copies: dict[str, ir.Value] = {}  # of the templates' cache tensors and weights, by their new names
    nodes: list[ir.Node] = []
    hidden_states = values["hidden_states.0"]
    for number in range(1, spec.num_hidden_layers - 1):
        made, hidden_states = by_kind[spec.layers[number]].copy(number, hidden_states, copies)
        nodes += made
    templates[-1].hidden_out.replace_all_uses_with(hidden_states)
    _remove(templates, model.graph)
    for named in (*_values(model.graph), *model.graph):
        if named.name:
            named.name = _renumbered(named.name, len(layers) - 1, spec.num_hidden_layers - 1)
    model.graph.extend(nodes)
    for value in copies.values():
        if value.const_value is not None:
            model.graph.register_initializer(value)
    _refer_to(store, model.graph)

    values = {value.name: value for value in (*_values(model.graph), *copies.values()) if value.name}
    for ports, tensors in (
        (model.graph.inputs, graph_inputs(graph, spec, dtype)),
        (model.graph.outputs, graph_outputs(graph, spec, dtype)),
    ):
        ports.clear()
        for tensor in tensors:
            values[tensor.name].shape = ir.Shape(tensor.shape)
            ports.append(values[tensor.name])
    model.graph.sort()


class _Layer:
    """A traced layer.

    Attributes:
        number: in the shallow model.
        nodes: in the graph's order.
        hidden_in, hidden_out: ``hidden_states`` before and after it.
        given: its cache tensors and weights.
        present: its new rows, where the graph gives them out.
    """

    def __init__(self, number: int, graph: ir.Graph, values: Mapping[str, ir.Value]) -> None:
        self.number = number
        self.hidden_in, self.hidden_out = values[f"hidden_states.{number - 1}"], values[f"hidden_states.{number}"]
        self.present = [values[name] for name in present_names(number) if name in values]
        weights = [value for value in graph.initializers.values() if _layer_of(value.name) == number]
        # In the graph's order, not a set: their copies are written in this order, and equal traces give equal bytes.
        self.given = [*weights, *(values[name] for name in past_names(number))]
        needed = _ancestors([self.hidden_out, *self.present], stop=self.hidden_in)
        own = _descendants([self.hidden_in, *self.given]) & needed
        self.nodes = [node for node in graph if node in own]

    def copy(self, number: int, hidden_in: ir.Value, given: dict[str, ir.Value]) -> tuple[list[ir.Node], ir.Value]:
        """Copies of the nodes for another layer.

        Args:
            number: of the other layer, in the whole model.
            hidden_in: what it reads.
            given: cache tensors and weights of the copies, by name; the other layer's are added.

        Returns:
            the nodes, and the hidden states that they give out.
        """
        copies = {self.hidden_in: hidden_in}
        for value in self.given:
            name = _renumbered(value.name or "", self.number, number)
            copies[value] = given[name] = _like(value, name)
        nodes = []
        for node in self.nodes:
            outputs = []
            for value in node.outputs:
                copies[value] = _like(value, self._name(value.name, number))
                outputs.append(copies[value])
            nodes.append(
                ir.Node(
                    node.domain,
                    node.op_type,
                    [None if value is None else copies.get(value, value) for value in node.inputs],
                    node.attributes.values(),
                    outputs=outputs,
                    name=self._name(node.name, number),
                )
            )
        given.update({copies[value].name or "": copies[value] for value in self.present})
        return nodes, copies[self.hidden_out]

    def _name(self, name: str | None, number: int) -> str:
        """A name for the copy of something inside the layer."""
        own = _layer_of(name) == self.number
        return _renumbered(name or "", self.number, number) if own else f"layers.{number}/{name}"


def _remove(layers: list[_Layer], graph: ir.Graph) -> None:
    """Takes layers out of the graph; nothing that stays may use them any more."""
    given = {value for layer in layers for value in layer.given}
    ports = given.union(*(layer.present for layer in layers))
    for values in (graph.inputs, graph.outputs):
        kept = [value for value in values if value not in ports]
        values.clear()
        values.extend(kept)
    graph.remove([node for layer in layers for node in layer.nodes], safe=True)
    for value in given:
        graph.initializers.pop(value.name or "", None)


def _check_apart(layers: list[_Layer], graph: ir.Graph) -> None:
    """Refuses layers that are tied to others by more than hidden states.

    Raises:
        TraceError: names the layer and the value.
    """
    weights = [value for value in graph.initializers.values() if _layer_of(value.name) is not None]
    layered = _descendants([*weights, *(layer.hidden_in for layer in layers)])
    for layer in layers:
        own = set(layer.nodes)
        read = {value for node in layer.nodes for value in node.inputs if value is not None}
        foreign = [
            value.name
            for value in read - {*layer.given, layer.hidden_in}
            if value.producer() not in own and (value.producer() in layered or _layer_of(value.name) is not None)
        ]
        given_out = [
            value.name
            for node in layer.nodes
            for value in node.outputs
            if value is not layer.hidden_out and value not in layer.present
            if value.is_graph_output() or not own.issuperset(value.consumers())
        ]
        if foreign or given_out:
            what = f"reads {foreign[0]}" if foreign else f"gives out {given_out[0]}"
            raise TraceError(
                f"layer {layer.number} of the traced graph {what}",
                expected="a layer that takes and gives hidden states, keys and values, so that it can be repeated",
            )


def _refer_to(store: Store, graph: ir.Graph) -> None:
    """Points every reference at where the weight of its name lies in ``store``."""
    for name, value in graph.initializers.items():
        place = value.const_value
        if isinstance(place, ir.ExternalTensor):
            stored = store.tensors[name]
            value.const_value = ir.ExternalTensor(
                location=stored.file.name,
                offset=stored.offset,
                length=stored.nbytes,
                dtype=place.dtype,
                shape=place.shape,
                name=name,
            )


def _like(value: ir.Value, name: str) -> ir.Value:
    return ir.Value(name=name, shape=value.shape, type=value.type, const_value=value.const_value)


def _layer_of(name: str | None) -> int | None:
    """The layer whose number a name has."""
    found = _LAYER.search(name or "")
    return int(found[2]) if found else None


def _renumbered(name: str, old: int, new: int) -> str:
    """The name with another layer's number, where it has the ``old`` one."""
    return _LAYER.sub(lambda found: f"{found[1]}.{new}" if int(found[2]) == old else found[0], name)


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def _descendants(values: Iterable[ir.Value]) -> set[ir.Node]:
    """All nodes that depend on one of the values."""
    found: set[ir.Node] = set()
    waiting = list(values)
    while waiting:
        for node in waiting.pop().consumers():
            if node not in found:
                found.add(node)
                waiting.extend(node.outputs)
    return found


def _ancestors(values: Iterable[ir.Value], stop: ir.Value) -> set[ir.Node]:
    """All nodes that one of the values depends on, but not those behind ``stop``."""
    found: set[ir.Node] = set()
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        node = None if value is stop else value.producer()
        if node is not None and node not in found:
            found.add(node)
            waiting.extend(source for source in node.inputs if source is not None)
    return found
