"""Embeddings and recurrent layers."""

import torch
from torch import nn

from cases._case import Apply, Custom, case, net, parameter, sequences, tokens

_text = tokens(6, 7)


def _head(features: int = 8) -> nn.Module:
    return nn.Sequential(nn.Tanh(), nn.Linear(features, 3))


def _recurrent(layer: nn.Module) -> nn.Module:
    return net(rnn=layer, last=Apply(lambda output: output[0]), ln=nn.LayerNorm(8), head=_head())


CASES = [
    case(
        "embedding_ln",
        lambda: net(embed=nn.Embedding(11, 8), ln=nn.LayerNorm(8), head=_head()),
        _text,
        rows={"embed.weight": "filter"},
    ),
    case(
        "embedding_ln_few_tokens",  # most of the vocabulary is never looked up
        lambda: net(embed=nn.Embedding(40, 8, padding_idx=0), ln=nn.RMSNorm(8), head=_head()),
        tokens(2, 4),
        rows={"embed.weight": "filter"},
    ),
    case(
        "embedding_max_norm_ln",  # the forward pass itself writes to the parameter
        lambda: net(embed=nn.Embedding(11, 8, max_norm=1.0), ln=nn.LayerNorm(8), head=_head()),
        _text,
        rows={"embed.weight": "filter"},
    ),
    case(
        "embedding_bn",  # statistics over the tokens: the columns are free, the tokens are not
        lambda: net(
            embed=nn.Embedding(11, 8),
            swap=Apply(lambda x: x.transpose(1, 2)),
            bn=nn.BatchNorm1d(8),
            back=Apply(lambda x: x.transpose(1, 2)),
            head=_head(),
        ),
        _text,
        rows={"embed.weight": ("axis", 1)},
    ),
    case(
        "embedding_bag_ln",
        lambda: net(embed=nn.EmbeddingBag(11, 8, mode="mean"), ln=nn.LayerNorm(8), head=_head()),
        _text,
        rows={"embed.weight": "tensor"},
    ),
    case(
        "three_embeddings_ln",
        lambda: Custom(
            lambda m, words, segments: m.head(m.ln(m.word(words) + m.position + m.segment(segments))),
            word=nn.Embedding(11, 8),
            position=parameter(7, 8),
            segment=nn.Embedding(2, 8),
            ln=nn.LayerNorm(8),
            head=_head(),
        ),
        lambda: ((torch.randint(11, (6, 7)), torch.randint(2, (6, 7))), {}),
        joint={"word.weight position segment.weight": "tensor"},
    ),
    case(
        "embedding_projected_bn",
        lambda: net(
            embed=nn.Embedding(11, 6),
            flat=nn.Flatten(),
            fc=nn.Linear(42, 5),
            bn=nn.BatchNorm1d(5),
            head=_head(5),
        ),
        tokens(12, 7),
        rows={"embed.weight": "tensor", "fc.weight": "filter"},
        no_effect="fc.bias",
    ),
    case("gru_ln", lambda: _recurrent(nn.GRU(8, 8, batch_first=True)), sequences),
    case("lstm_ln", lambda: _recurrent(nn.LSTM(8, 8, batch_first=True)), sequences),
    case("rnn_tanh_ln", lambda: _recurrent(nn.RNN(8, 8, batch_first=True)), sequences),
    case(
        "rnn_relu_ln",  # the state is proportional to what enters, not to the recurrence
        lambda: _recurrent(nn.RNN(8, 8, nonlinearity="relu", bias=False, batch_first=True)),
        sequences,
        rows={"rnn.weight_ih_l0": "tensor"},
    ),
    case(
        "gru_input_ln",  # the norm stands before the gates
        lambda: Custom(
            lambda m, x: m.head(m.rnn(m.ln(m.fc(x)))[0]),
            fc=nn.Linear(8, 6, bias=False),
            ln=nn.LayerNorm(6),
            rnn=nn.GRU(6, 4, batch_first=True),
            head=_head(4),
        ),
        sequences,
        rows={"fc.weight": "tensor"},
    ),
]
