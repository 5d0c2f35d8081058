"""Analyses are made once while a graph stands still, and anew behind every edit."""

from __future__ import annotations

from torch.fx import Graph

from fxopt.shape.standing import analysed, edited, reading


class Nodes:
    def __init__(self, graph: Graph):
        self.names = [node.name for node in graph.nodes]


def test_an_analysis_is_made_once_until_the_next_edit():
    graph = Graph()
    graph.placeholder("x")
    with reading(graph):
        first = analysed(graph, Nodes)
        assert analysed(graph, Nodes) is first
        assert analysed(Graph(), Nodes).names == []
    with reading(graph):
        assert analysed(graph, Nodes) is first
    graph.placeholder("y")
    edited(graph)
    with reading(graph):
        assert analysed(graph, Nodes).names == ["x", "y"]


def test_nothing_is_kept_where_nobody_promised_that_the_graph_stands():
    graph = Graph()
    assert analysed(graph, Nodes).names == []
    graph.placeholder("x")
    assert analysed(graph, Nodes).names == ["x"]
