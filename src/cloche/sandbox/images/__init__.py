"""The file systems machines start from: how they are built, named, found and removed."""

from cloche.sandbox.images.build import Progress as Progress
from cloche.sandbox.images.store import Images as Images
from cloche.sandbox.images.store import Listed as Listed
from cloche.sandbox.images.store import Record as Record
