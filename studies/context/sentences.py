"""Words with two senses, four sentences a sense, and the words of each sentence that tell which sense it is."""

from __future__ import annotations

from typing import NamedTuple


class Use(NamedTuple):
    """One use of a word: the sentence, and the other words in it that give the sense away."""

    sentence: str
    cues: tuple[str, ...]


WORDS: dict[str, dict[str, list[Use]]] = {
    "bank": {
        "money": [
            Use("She opened an account at the bank to save money.", ("account", "save", "money")),
            Use("The bank refused to lend him the cash.", ("lend", "cash")),
            Use("He took the cheque to the bank and paid his debts.", ("paid", "debts")),
            Use("Interest rates at the bank rose again.", ("interest", "rates")),
        ],
        "river": [
            Use("They sat on the bank and watched the river.", ("river",)),
            Use("The boat drifted towards the muddy bank.", ("boat", "drifted", "muddy")),
            Use("Trees grew along the bank of the stream.", ("trees", "stream")),
            Use("He fished from the grassy bank until dark.", ("fished", "grassy")),
        ],
    },
    "bat": {
        "animal": [
            Use("A bat flew out of the cave at dusk.", ("flew", "cave", "dusk")),
            Use("The bat hangs upside down to sleep.", ("hangs", "upside", "sleep")),
            Use("At night the bat hunts insects with its ears.", ("night", "hunts", "insects", "ears")),
            Use("We saw a bat asleep under the roof of the barn.", ("asleep", "roof", "barn")),
        ],
        "club": [
            Use("He swung the bat and hit the ball.", ("swung", "hit", "ball")),
            Use("The player broke his bat in the last game.", ("player", "broke", "game")),
            Use("She held the bat with both hands and waited for the pitch.", ("held", "hands", "pitch")),
            Use("A wooden bat lay beside the baseball glove.", ("wooden", "baseball", "glove")),
        ],
    },
    "spring": {
        "season": [
            Use("In spring the cherry trees blossom.", ("cherry", "trees", "blossom")),
            Use("The birds return every spring from the south.", ("birds", "return", "every")),
            Use("They planted flowers for the spring.", ("planted", "flowers")),
            Use("After a cold winter, spring came early.", ("cold", "winter", "early")),
        ],
        "coil": [
            Use("The spring in the mattress is broken.", ("mattress", "broken")),
            Use("A metal spring pushes the valve shut.", ("metal", "pushes", "valve")),
            Use("He stretched the spring until it snapped.", ("stretched", "snapped")),
            Use("The watch needs a new spring and a gear.", ("watch", "gear")),
        ],
    },
    "light": {
        "lamp": [
            Use("The light of the lamp fell on the page.", ("lamp", "fell", "page")),
            Use("Switch off the light before you sleep.", ("switch", "off")),
            Use("A bright light shone through the window.", ("bright", "shone", "window")),
            Use("The light in the kitchen flickered.", ("kitchen", "flickered")),
        ],
        "weight": [
            Use("The bag was light enough to carry.", ("bag", "enough", "carry")),
            Use("A feather is light and soft.", ("feather", "soft")),
            Use("She packed a light suitcase.", ("packed", "suitcase")),
            Use("The box felt light because it was empty.", ("box", "felt", "empty")),
        ],
    },
}
