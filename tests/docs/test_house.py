"""The picture of the house shows the imports as they are."""

from __future__ import annotations

from dataclasses import replace

from scripts import draw_house


def test_the_picture_is_that_of_the_imports() -> None:
    assert draw_house.PICTURE.read_text() == draw_house.draw(draw_house.rooms()), "run: make house"


def test_another_import_is_another_picture() -> None:
    rooms = draw_house.rooms()
    changed = [replace(room, imports=(*room.imports, "launch")) if room.name == "ddp" else room for room in rooms]
    assert draw_house.draw(changed) != draw_house.draw(rooms)


def test_imports_go_down_the_floors_only() -> None:
    rooms = draw_house.rooms()
    floors = {room.name: room.floor for room in rooms}
    assert {(room.name, other) for room in rooms for other in room.imports if floors[other] >= room.floor} == set()
    assert len(floors) > 10
