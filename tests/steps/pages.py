"""Parses a page of steps into elements for tests: every tag is closed, links point inside the page, and no other file is loaded."""
from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "br"}


@dataclass
class Element:
    """A tag with its attributes, and the elements and texts in it."""

    name: str
    attributes: dict[str, str] = field(default_factory=dict)
    inside: list[Element | str] = field(default_factory=list)

    @property
    def classes(self) -> list[str]:
        return self.attributes.get("class", "").split()

    @property
    def text(self) -> str:
        return "".join(x if isinstance(x, str) else x.text for x in self.inside)

    def every(self, name: str, of: str = "") -> list[Element]:
        """The elements with that name below this one, in order; `of`: only those of this class."""
        found: list[Element] = []
        for x in self.inside:
            if isinstance(x, Element):
                found += [x] if x.name == name and (not of or of in x.classes) else []
                found += x.every(name, of)
        return found

    def own(self, name: str) -> Element:
        """The first element with that name among the children."""
        return next(x for x in self.inside if isinstance(x, Element) and x.name == name)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = [Element("page")]

    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        made = Element(name, {key: value or "" for key, value in attrs})
        self.open[-1].inside.append(made)
        if name not in VOID:
            self.open.append(made)

    def handle_endtag(self, name: str) -> None:
        assert self.open[-1].name == name, f"</{name}> closes {[e.name for e in self.open[-3:]]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].inside.append(data)


def read_page(page: str) -> Element:
    """Parse a page. Fails if a tag is not closed, an id occurs twice, a link has no target or leads outside, or there is a script."""
    reader = _Reader()
    reader.feed(page)
    assert len(reader.open) == 1
    (root,) = reader.open
    elements = _under(root)
    ids = [e.attributes["id"] for e in elements if "id" in e.attributes]
    links = [e.attributes["href"] for e in elements if "href" in e.attributes]
    assert len(ids) == len(set(ids)) and {link[1:] for link in links} <= set(ids) and all(link.startswith("#") for link in links)
    assert not [e for e in elements if e.name in ("script", "link", "img", "iframe") or e.attributes.keys() & {"src", "srcset", "onclick"}]
    style = "".join(e.text for e in elements if e.name == "style")
    assert "url(" not in style and "@import" not in style
    return root


def _under(element: Element) -> list[Element]:
    return [e for x in element.inside if isinstance(x, Element) for e in (x, *_under(x))]


def kernels_of(page: Element) -> dict[str, list[Element]]:
    """The steps of each kernel of a page, by its name."""
    return {k.own("summary").every("span", "origin")[0].text: steps_in(k.own("div")) for k in page.every("details", "kernel")}


def steps_in(element: Element) -> list[Element]:
    return [x for x in element.inside if isinstance(x, Element) and x.name == "details"]


def title_of(step: Element) -> str:
    return step.own("summary").every("span", "origin")[0].text


def sides_of(step: Element) -> list[tuple[str, str, str]]:
    """The rows of a step that is compared: the line before, the sign, and the line after."""
    return [(a.text, sign.text, b.text) for r in step.every("tbody")[0].every("tr") for a, sign, b in [r.every("td")]]
