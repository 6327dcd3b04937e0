//! Properties for the fuzz target `http2`: the bytes for the server do not depend on how the client's bytes are split, and equal the
//! client's except for the authority.

use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use http::uri::Authority;
use tokio::io::{AsyncRead, ReadBuf};

use super::Connection;
use super::hpack::{Decoder, Malformed};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const HEADERS: u8 = 0x1;
const CONTINUATION: u8 = 0x9;
const END_STREAM: u8 = 0x1;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;

/// Decoded header lists.
type List = Vec<(Vec<u8>, Vec<u8>)>;

/// Checks one client's bytes. The first byte selects how they are split, and whether the preface of HTTP/2 precedes them. Returns whether
/// all of them passed, with a request among them.
pub fn http2(data: &[u8]) -> bool {
    let Some((&seed, rest)) = data.split_first() else {
        return false;
    };
    let stream = if seed & 1 == 0 {
        [PREFACE, rest].concat()
    } else {
        rest.to_owned()
    };
    let whole = read(&stream, || usize::MAX, 64 << 10);
    let mut random = u64::from(seed) + 1;
    let cuts = [
        read(&stream, || 1, 1),
        read(&stream, || usize::MAX, 7),
        read(&stream, || 1, 64 << 10),
        read(&stream, || next(&mut random), 100),
    ];
    for cut in cuts {
        check_same(&whole, &cut);
    }
    whole.violation.is_none() && check_meaning(&stream, &whole.output)
}

/// Generates lengths from a seed (xorshift).
fn next(state: &mut u64) -> usize {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    (*state % 40) as usize + 1
}

/// The bytes that a server reads.
struct ServerInput {
    output: Vec<u8>,
    violation: Option<String>,
}

/// A connection whose bytes arrive in pieces, and end.
struct Pieces<'a, F> {
    rest: &'a [u8],
    length: F,
}

impl<F: FnMut() -> usize + Unpin> AsyncRead for Pieces<'_, F> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let length = (self.length)().min(self.rest.len()).min(buf.remaining());
        let (piece, rest) = self.rest.split_at(length);
        self.rest = rest;
        buf.put_slice(piece);
        Poll::Ready(Ok(()))
    }
}

fn read(stream: &[u8], length: impl FnMut() -> usize + Unpin, at_once: usize) -> ServerInput {
    let mut connection = Connection::new(Pieces {
        rest: stream,
        length,
    });
    let mut cx = Context::from_waker(Waker::noop());
    let (mut output, mut space) = (Vec::new(), vec![0; at_once]);
    loop {
        let mut buf = ReadBuf::new(&mut space);
        match Pin::new(&mut connection).poll_read(&mut cx, &mut buf) {
            Poll::Ready(Ok(())) if buf.filled().is_empty() => {
                return ServerInput {
                    output,
                    violation: None,
                };
            }
            Poll::Ready(Ok(())) => output.extend_from_slice(buf.filled()),
            Poll::Ready(Err(error)) => {
                return ServerInput {
                    output,
                    violation: Some(error.to_string()),
                };
            }
            Poll::Pending => unreachable!("the bytes are there"),
        }
    }
}

/// A violation ends the connection, and the number of valid bytes that passed before it depends on the split.
fn check_same(one: &ServerInput, other: &ServerInput) {
    assert_eq!(
        one.violation, other.violation,
        "what is refused depends on how it is cut"
    );
    if one.violation.is_none() {
        assert_eq!(
            one.output, other.output,
            "what passes depends on how it is cut"
        );
    }
    let (short, long) = if one.output.len() < other.output.len() {
        (one, other)
    } else {
        (other, one)
    };
    assert!(
        long.output.starts_with(&short.output),
        "what passes depends on how it is cut"
    );
}

/// A frame and the start of the next one. The last frame may be truncated.
struct Frame<'a> {
    bytes: &'a [u8],
    kind: u8,
    flags: u8,
    stream: [u8; 4],
    payload: &'a [u8],
    is_whole: bool,
}

impl<'a> Frame<'a> {
    /// `None`: the header is incomplete.
    fn first(bytes: &'a [u8]) -> Option<(Self, &'a [u8])> {
        let (&[a, b, c, kind, flags, s, t, u, v], behind) = bytes.split_first_chunk::<9>()?;
        let length = u32::from_be_bytes([0, a, b, c]) as usize;
        let payload = &behind[..length.min(behind.len())];
        let (bytes, rest) = bytes.split_at(9 + payload.len());
        let is_whole = payload.len() == length;
        Some((
            Self {
                bytes,
                kind,
                flags,
                stream: [s & 0x7f, t, u, v],
                payload,
                is_whole,
            },
            rest,
        ))
    }

    /// Returns the payload of a header block's frame without padding and priority.
    fn fragment(&self) -> &'a [u8] {
        if self.kind != HEADERS {
            return self.payload;
        }
        let padding = if self.flags & PADDED != 0 {
            1 + usize::from(self.payload[0])
        } else {
            0
        };
        let start = usize::from(padding > 0) + if self.flags & PRIORITY != 0 { 5 } else { 0 };
        &self.payload[start..self.payload.len() - padding.saturating_sub(1)]
    }
}

/// A header block with the relevant fields of its frames.
struct Block {
    stream: [u8; 4],
    end_stream: bool,
    fragments: Vec<u8>,
}

impl Block {
    /// Returns the block that begins with a frame. `None`: it is incomplete.
    fn take<'a>(first: &Frame<'a>, mut rest: &'a [u8]) -> Option<(Self, &'a [u8])> {
        let mut fragments = if first.is_whole {
            first.fragment().to_owned()
        } else {
            return None;
        };
        let mut flags = first.flags;
        while flags & END_HEADERS == 0 {
            let (frame, behind) = Frame::first(rest)?;
            if !frame.is_whole {
                return None;
            }
            assert_eq!(
                frame.kind, CONTINUATION,
                "a block was interrupted and passed"
            );
            fragments.extend_from_slice(frame.payload);
            (flags, rest) = (frame.flags, behind);
        }
        Some((
            Self {
                stream: first.stream,
                end_stream: first.flags & END_STREAM != 0,
                fragments,
            },
            rest,
        ))
    }

    fn list(&self, decoder: &mut Decoder) -> List {
        let mut list = List::new();
        let field = |name: &[u8], value: &[u8]| {
            list.push((name.to_owned(), value.to_owned()));
            Ok::<(), Malformed>(())
        };
        decoder
            .decode(&self.fragments, field)
            .expect("what passed can be decoded");
        list
    }
}

/// Checks frame by frame: other frames are unchanged, and a header block has the same fields except for an invalid authority. Returns
/// whether there was a block.
fn check_meaning(input: &[u8], output: &[u8]) -> bool {
    let Some(mut input) = input.strip_prefix(PREFACE) else {
        assert!(
            PREFACE.starts_with(input) && input == output,
            "the preface has not come to its end"
        );
        return false;
    };
    let mut output = output.strip_prefix(PREFACE).expect("the preface passes");
    let (mut decoder, mut blocks) = (Decoder::default(), 0);
    while let Some((frame, rest)) = Frame::first(input) {
        if frame.kind != HEADERS {
            let (same, behind) = output
                .split_at_checked(frame.bytes.len())
                .expect("what passes is all there");
            assert_eq!(same, frame.bytes, "a frame without headers was changed");
            (input, output) = (rest, behind);
            continue;
        }
        let Some((block, rest)) = Block::take(&frame, rest) else {
            break;
        };
        let (written, behind) = Frame::first(output).expect("a block passes as a whole");
        assert_eq!(written.kind, HEADERS);
        let (written, behind) = Block::take(&written, behind).expect("a block passes as a whole");
        assert_eq!(
            (written.stream, written.end_stream),
            (block.stream, block.end_stream)
        );
        check_list(
            &block.list(&mut decoder),
            &written.list(&mut Decoder::default()),
        );
        (input, output) = (rest, behind);
        blocks += 1;
    }
    assert!(output.is_empty(), "{} additional bytes", output.len());
    blocks > 0
}

fn check_list(sent: &List, passed: &List) {
    assert_eq!(sent.len(), passed.len(), "fields came or went");
    for (sent, passed) in sent.iter().zip(passed) {
        let is_wrong = sent.0 == b":authority" && Authority::try_from(sent.1.as_slice()).is_err();
        let expected = if is_wrong {
            b"localhost".as_slice()
        } else {
            &sent.1
        };
        assert_eq!((&passed.0, passed.1.as_slice()), (&sent.0, expected));
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::http2;

    /// The name of a seed states its outcome: `refused-…`, or else it passes.
    #[test]
    fn seeds_keep_outcome_with_changed_byte() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds/http2");
        let mut passed = 0;
        for entry in std::fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            let (name, bytes) = (
                path.file_name().unwrap().to_str().unwrap(),
                std::fs::read(&path).unwrap(),
            );
            assert_eq!(http2(&bytes), !name.starts_with("refused-"), "{name}");
            passed += usize::from(!name.starts_with("refused-"));
            for (at, change) in (0..bytes.len()).zip([0x01, 0x20, 0x80, 0xff].into_iter().cycle()) {
                let mut changed = bytes.clone();
                changed[at] ^= change;
                println!("{name}, byte {at} ^ {change:#x}");
                http2(&changed);
                http2(&bytes[..at]);
            }
        }
        assert!(passed > 0);
    }
}
