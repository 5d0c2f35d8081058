"""Analyses are made once while a graph stands still, and anew behind every edit."""

from __future__ import annotations

from torch.fx import Graph

from fxopt.shape.standing import analysed, edited, reading, remembered


class Nodes:
    def __init__(self, graph: Graph):
        self.names = [node.name for node in graph.nodes]


def test_an_analysis_is_made_once_until_the_next_edit():
    graph = Graph()
    graph.placeholder("x")
    with remembered(graph):
        with reading(graph):
            first = analysed(graph, Nodes)
            assert analysed(graph, Nodes) is first
            assert analysed(Graph(), Nodes).names == []
        assert analysed(graph, Nodes) is not first  # where somebody may edit it
        with reading(graph):
            assert analysed(graph, Nodes) is first
        graph.placeholder("y")
        edited(graph)
        with reading(graph):
            assert analysed(graph, Nodes).names == ["x", "y"]


def test_nothing_is_kept_for_others():
    graph = Graph()
    with remembered(Graph()), reading(graph):
        assert analysed(graph, Nodes).names == []
        graph.placeholder("x")
        assert analysed(graph, Nodes).names == ["x"]
