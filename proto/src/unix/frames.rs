//! Parses one client's HTTP/2 frame by frame, without IO.
//!
//! Given bytes in pieces of any size, it returns which of them pass unchanged, and emits replacements for the others: the frames of
//! header blocks. It decodes each block with the client's compression state and encodes it again without any state (`hpack::literal`),
//! so that the server's state stays empty and cannot differ from the client's. It drops padding and priorities; `h2` reads neither.
//!
//! It never buffers a frame that is not part of a header block, and checks no rule that the server checks: the size of other
//! frames, the order of streams, the fields of a request.

use std::ops::ControlFlow;

use bytes::{BufMut, BytesMut};
use http::uri::Authority;

use super::hpack::{self, Malformed};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const HEAD_BYTES: usize = 9;
/// Frame size that every endpoint accepts (RFC 9113, 4.2): emitted frames are not larger.
const FRAME_BYTES_MAX: usize = 16 << 10;
/// Bound of a header block on the wire with the headers of its frames, and of its header list, counted as SETTINGS_MAX_HEADER_LIST_SIZE
/// counts: four times the bound of tonic's servers, so that a client sees their response, and small enough for every connection.
const BLOCK_BYTES_MAX: usize = 64 << 10;
const LIST_BYTES_MAX: usize = 64 << 10;
/// Overhead of each field of a list (RFC 9113, 10.5.1).
const FIELD_OVERHEAD: usize = 32;

const HEADERS: u8 = 0x1;
const PUSH_PROMISE: u8 = 0x5;
const CONTINUATION: u8 = 0x9;

const END_STREAM: u8 = 0x1;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
const PRIORITY_BYTES: usize = 5;

/// A violation by the client after which the rest has no defined meaning.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Violation {
    #[error("the connection does not begin with the preface of HTTP/2")]
    NotHttp2,
    #[error("a server's frame (PUSH_PROMISE) came from a client")]
    PushPromise,
    #[error("HEADERS without a stream")]
    NoStream,
    #[error("CONTINUATION without HEADERS before it")]
    StrayContinuation,
    #[error("a frame of type {0:#x} within the header block of a stream")]
    BlockInterrupted(u8),
    #[error("the padding or priority of HEADERS does not fit into the frame")]
    HeadersTooShort,
    #[error("a header block of more than {BLOCK_BYTES_MAX} bytes")]
    BlockTooLarge,
    #[error("a header list of more than {LIST_BYTES_MAX} bytes")]
    ListTooLarge,
    #[error("malformed header compression: {0}")]
    Hpack(#[from] Malformed),
}

/// Position in the client's bytes.
#[derive(Debug)]
enum At {
    Preface {
        matched: usize,
    },
    Head {
        bytes: [u8; HEAD_BYTES],
        filled: usize,
    },
    /// Within a frame that passes unchanged.
    Passing {
        left: usize,
    },
    /// Within a frame of a header block.
    Block {
        frame: Head,
        left: usize,
    },
}

const NEXT_HEAD: At = At::Head {
    bytes: [0; HEAD_BYTES],
    filled: 0,
};

/// The header of a frame.
#[derive(Debug, Clone, Copy)]
struct Head {
    length: usize,
    kind: u8,
    flags: u8,
    stream: u32,
}

/// The current incomplete header block. Between two blocks it is empty.
#[derive(Debug, Default)]
struct Block {
    /// Zero: no block.
    stream: u32,
    flags: u8,
    /// Size of all its frames with their headers.
    bytes_on_wire: usize,
    /// The frames' payloads without padding and priority.
    fragments: Vec<u8>,
    /// Start of the current frame in `fragments`.
    frame_start: usize,
}

/// The state of one connection's client.
#[derive(Debug)]
pub(super) struct Inbound {
    at: At,
    hpack: hpack::Decoder,
    block: Block,
}

impl Default for Inbound {
    fn default() -> Self {
        Self {
            at: At::Preface { matched: 0 },
            hpack: hpack::Decoder::default(),
            block: Block::default(),
        }
    }
}

impl Inbound {
    /// Returns the number of bytes at the beginning of `chunk` that pass unchanged. The rest is for `take`.
    pub(super) fn passing(&mut self, chunk: &[u8]) -> Result<usize, Violation> {
        let mut passed = 0;
        while let ControlFlow::Continue(length) = self.pass(&chunk[passed..])? {
            passed += length;
        }
        Ok(passed)
    }

    fn pass(&mut self, rest: &[u8]) -> Result<ControlFlow<(), usize>, Violation> {
        match self.at {
            _ if rest.is_empty() => Ok(ControlFlow::Break(())),
            At::Preface { matched } => self.match_preface(matched, rest).map(ControlFlow::Continue),
            At::Passing { left } => Ok(ControlFlow::Continue(self.pass_payload(left, rest))),
            At::Head { filled: 0, .. } => match rest.first_chunk().map(Head::parse) {
                Some(head) if head.passes() && !self.block.is_open() => {
                    self.at = after_head(head);
                    Ok(ControlFlow::Continue(HEAD_BYTES))
                }
                _ => Ok(ControlFlow::Break(())),
            },
            At::Head { .. } | At::Block { .. } => Ok(ControlFlow::Break(())),
        }
    }

    /// Consumes bytes from the beginning of the non-empty `chunk` and returns how many. It writes the bytes for the server to `out`, at the
    /// latest with the last byte of a frame. One call writes `chunk` or one header block and no more.
    pub(super) fn take(&mut self, chunk: &[u8], out: &mut BytesMut) -> Result<usize, Violation> {
        let passed = self.passing(chunk)?;
        if passed > 0 {
            out.extend_from_slice(&chunk[..passed]);
            return Ok(passed);
        }
        match &mut self.at {
            At::Head { bytes, filled } => {
                let taken = chunk.len().min(HEAD_BYTES - *filled);
                bytes[*filled..*filled + taken].copy_from_slice(&chunk[..taken]);
                *filled += taken;
                if *filled == HEAD_BYTES {
                    let bytes = *bytes;
                    self.begin(&bytes, out)?;
                }
                Ok(taken)
            }
            At::Block { frame, left } => {
                let (frame, taken) = (*frame, chunk.len().min(*left));
                *left -= taken;
                let ended = *left == 0;
                self.block.fragments.extend_from_slice(&chunk[..taken]);
                if ended {
                    self.end_frame(frame, out)?;
                }
                Ok(taken)
            }
            At::Preface { .. } | At::Passing { .. } => unreachable!("these bytes pass"),
        }
    }

    fn match_preface(&mut self, matched: usize, rest: &[u8]) -> Result<usize, Violation> {
        let expected = &PREFACE[matched..];
        let length = expected.len().min(rest.len());
        if rest[..length] != expected[..length] {
            return Err(Violation::NotHttp2);
        }
        let matched = matched + length;
        self.at = if matched == PREFACE.len() {
            NEXT_HEAD
        } else {
            At::Preface { matched }
        };
        Ok(length)
    }

    fn pass_payload(&mut self, left: usize, rest: &[u8]) -> usize {
        let length = left.min(rest.len());
        self.at = passing(left - length);
        length
    }

    /// Handles a complete frame header.
    fn begin(&mut self, bytes: &[u8; HEAD_BYTES], out: &mut BytesMut) -> Result<(), Violation> {
        let head = Head::parse(bytes);
        self.block.expects(head)?;
        if head.passes() {
            out.extend_from_slice(bytes);
            self.at = after_head(head);
            return Ok(());
        }
        self.block.begin_frame(head)?;
        self.at = At::Block {
            frame: head,
            left: head.length,
        };
        if head.length == 0 {
            self.end_frame(head, out)
        } else {
            Ok(())
        }
    }

    /// Handles a complete frame of a header block.
    fn end_frame(&mut self, frame: Head, out: &mut BytesMut) -> Result<(), Violation> {
        self.at = NEXT_HEAD;
        self.block.strip(frame)?;
        if frame.flags & END_HEADERS == 0 {
            return Ok(());
        }
        let block = std::mem::take(&mut self.block);
        let list = self.rewrite(&block.fragments)?;
        write_block(block.stream, block.flags & END_STREAM, &list, out);
        Ok(())
    }

    /// Encodes the header list with a valid authority.
    fn rewrite(&mut self, block: &[u8]) -> Result<Vec<u8>, Violation> {
        let mut list = Vec::with_capacity(2 * block.len());
        let mut list_bytes = 0;
        self.hpack.decode(block, |name, value| {
            list_bytes += name.len() + value.len() + FIELD_OVERHEAD;
            if list_bytes > LIST_BYTES_MAX {
                return Err(Violation::ListTooLarge);
            }
            let wrong = name == b":authority" && Authority::try_from(value).is_err();
            hpack::literal(name, if wrong { b"localhost" } else { value }, &mut list);
            Ok(())
        })?;
        Ok(list)
    }
}

impl Head {
    fn parse(bytes: &[u8; HEAD_BYTES]) -> Self {
        let [l0, l1, l2, kind, flags, s0, s1, s2, s3] = *bytes;
        let length = u32::from_be_bytes([0, l0, l1, l2]) as usize;
        // The highest bit is reserved and ignored.
        let stream = u32::from_be_bytes([s0 & 0x7f, s1, s2, s3]);
        Self {
            length,
            kind,
            flags,
            stream,
        }
    }

    fn write(self, out: &mut BytesMut) {
        out.put_uint(self.length as u64, 3);
        out.put_slice(&[self.kind, self.flags]);
        out.put_u32(self.stream);
    }

    fn passes(self) -> bool {
        !matches!(self.kind, HEADERS | PUSH_PROMISE | CONTINUATION)
    }
}

impl Block {
    fn is_open(&self) -> bool {
        self.stream != 0
    }

    /// Returns whether this frame is allowed now: the frames of a header block are contiguous.
    fn expects(&self, frame: Head) -> Result<(), Violation> {
        match frame.kind {
            CONTINUATION if self.is_open() && frame.stream == self.stream => Ok(()),
            kind if self.is_open() => Err(Violation::BlockInterrupted(kind)),
            CONTINUATION => Err(Violation::StrayContinuation),
            PUSH_PROMISE => Err(Violation::PushPromise),
            HEADERS if frame.stream == 0 => Err(Violation::NoStream),
            _ => Ok(()),
        }
    }

    fn begin_frame(&mut self, frame: Head) -> Result<(), Violation> {
        // Frame headers count, so that empty frames are bounded, too.
        self.bytes_on_wire += HEAD_BYTES + frame.length;
        if self.bytes_on_wire > BLOCK_BYTES_MAX {
            return Err(Violation::BlockTooLarge);
        }
        if frame.kind == HEADERS {
            self.stream = frame.stream;
            self.flags = frame.flags;
        }
        self.frame_start = self.fragments.len();
        Ok(())
    }

    /// Removes padding and priority from the frame that has just ended.
    fn strip(&mut self, frame: Head) -> Result<(), Violation> {
        if frame.kind != HEADERS {
            return Ok(());
        }
        let payload = &self.fragments[self.frame_start..];
        let padded = frame.flags & PADDED != 0;
        let padding = if padded {
            *payload.first().ok_or(Violation::HeadersTooShort)?
        } else {
            0
        };
        let priority = if frame.flags & PRIORITY != 0 {
            PRIORITY_BYTES
        } else {
            0
        };
        let start = usize::from(padded) + priority;
        let end = payload
            .len()
            .checked_sub(usize::from(padding))
            .ok_or(Violation::HeadersTooShort)?;
        if start > end {
            return Err(Violation::HeadersTooShort);
        }
        self.fragments.truncate(self.frame_start + end);
        self.fragments
            .drain(self.frame_start..self.frame_start + start);
        Ok(())
    }
}

fn passing(left: usize) -> At {
    if left == 0 {
        NEXT_HEAD
    } else {
        At::Passing { left }
    }
}

fn after_head(head: Head) -> At {
    passing(head.length)
}

fn write_block(stream: u32, end_stream: u8, list: &[u8], out: &mut BytesMut) {
    let frames = list.len().div_ceil(FRAME_BYTES_MAX).max(1);
    out.reserve(list.len() + frames * HEAD_BYTES);
    for index in 0..frames {
        let rest = &list[index * FRAME_BYTES_MAX..];
        let fragment = &rest[..rest.len().min(FRAME_BYTES_MAX)];
        let (kind, begin) = if index == 0 {
            (HEADERS, end_stream)
        } else {
            (CONTINUATION, 0)
        };
        let end = if index + 1 == frames { END_HEADERS } else { 0 };
        Head {
            length: fragment.len(),
            kind,
            flags: begin | end,
            stream,
        }
        .write(out);
        out.extend_from_slice(fragment);
    }
}
