"""What goes over a gossip stream: the topics of each end, then envelopes, each after the number of
its topic. docs/wire.md, "Gossip", has it for other implementations.

    theirs = await greet(stream, GossipTopics(swarm=swarm, topics=("status/2",)))
    theirs, topic, envelope = split_frame(await receive_frame(stream), theirs)
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shoal.swarm.errors import MessageError
from shoal.swarm.p2p.messages import receive_message, send_message
from shoal.swarm.p2p.stream import Stream
from shoal.swarm.wire.envelope import MAX_MESSAGE, Message, SwarmId, unpack

Topic = Annotated[str, Field(pattern=r"^[a-z-]{1,32}/[0-9]{1,4}$")]
"""Kind and version of the records of a topic."""
MAX_TOPICS = 16
SMALL_S = 5.0
"""Seconds for the first message of a stream."""
BEAT_S = 15.0
"""After which the topics are sent again, if nothing else was: so that the other end knows of it."""
IDLE_S = 60.0
"""Without a byte, after which a stream is given up."""


class GossipTopics(Message):
    """What each end sends first, and again when a topic is added or nothing else was to be sent:
    the kinds and versions that it sends and takes. Later ones only add to the list.
    """

    KIND = "gossip-topics"
    LIMIT = 2048
    swarm: SwarmId
    topics: Annotated[tuple[Topic, ...], Field(max_length=MAX_TOPICS)]


def topic_of(kind: type[Message]) -> str:
    return f"{kind.KIND}/{kind.VERSION}"


def frame_of(number: int, envelope: bytes) -> bytes:
    """Return the frame of an envelope of topic ``number`` in the sender's list."""
    return bytes([number]) + envelope


async def receive_frame(stream: Stream) -> bytes:
    """Wait for a frame. Raises NetworkError, or MessageError of one that is too large."""
    return await stream.receive(1 + max(MAX_MESSAGE, GossipTopics.LIMIT), IDLE_S)


def split_frame(frame: bytes, topics: GossipTopics) -> tuple[GossipTopics, str, bytes]:
    """Return the sender's topics, and topic and content of an envelope; two empty ones if the frame
    only told the topics. ``topics``: those told before.

    Raises MessageError and nothing else.
    """
    if not frame:
        raise MessageError("An empty frame was refused.", "truncated")
    number = frame[0]
    if number < MAX_TOPICS:
        if number >= len(topics.topics):
            raise MessageError("A message of a topic without a name was refused.", "malformed")
        return topics, topics.topics[number], frame[1:]
    told = unpack(frame, GossipTopics)
    if told.swarm != topics.swarm or told.topics[: len(topics.topics)] != topics.topics:
        raise MessageError("A change of the topics was refused: it may only add some.", "malformed")
    return told, "", b""


async def greet(stream: Stream, topics: GossipTopics) -> GossipTopics:
    """Tell the topics, and return those of the other end.

    Raises NetworkError or MessageError.
    """
    await send_message(stream, topics, SMALL_S)
    return await greeted(stream, topics.swarm)


async def greeted(stream: Stream, swarm: str) -> GossipTopics:
    """Return the topics that the other end tells first. Raises NetworkError or MessageError."""
    told = await receive_message(stream, GossipTopics, SMALL_S)
    if told.swarm != swarm:
        raise MessageError("A stream of another swarm's gossip was refused.", "foreign-swarm")
    return told
