//! The format `nodedock-recording/1`: gzip of JSON lines. The first line is the header, the last one says how many are between.

use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};

use flate2::Compression;
use flate2::bufread::GzDecoder;
use flate2::write::GzEncoder;
use serde::{Deserialize, Serialize};

use super::{End, Line, Raw};

/// The format's name and version.
pub const FORMAT: &str = "nodedock-recording/1";

/// Bytes of a line: a driver's file in base64 is the longest.
const LINE_BYTES_MAX: u64 = 96 << 20;
/// Bytes of a recording that is read, without compression: a ring of the largest size, and some drivers' files.
pub const RECORDING_BYTES_MAX: u64 = 256 << 20;

/// The first line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Header {
    pub format: String,
    /// The recorded driver, or the extended resource of a device plugin.
    pub driver: String,
    /// Version of the daemon.
    pub nodedock: String,
    /// Secrets are replaced by placeholders.
    pub is_redacted: bool,
}

/// A recording, as it is read.
#[derive(Debug, Clone, PartialEq)]
pub struct Recording {
    pub header: Header,
    /// Without the last line.
    pub lines: Vec<Line>,
}

/// Why a file cannot be read as a recording.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error("it is not a recording: it does not begin with a header of {FORMAT} in gzip")]
    NotARecording,
    #[error("it has the format {0:?}, and this version reads {FORMAT}")]
    Format(String),
    #[error("it is truncated")]
    Truncated,
    #[error("it is larger than {} MiB without compression", RECORDING_BYTES_MAX >> 20)]
    TooLarge,
    #[error("line {number} is not valid: {why}")]
    Line { number: usize, why: String },
    #[error("read it: {0}")]
    Io(io::Error),
}

/// Writes a recording. `lines` are JSON texts with or without a line feed.
pub fn write<'a>(
    header: &Header,
    lines: impl IntoIterator<Item = &'a [u8]>,
    to: impl Write,
) -> io::Result<()> {
    let mut gzip = GzEncoder::new(to, Compression::default());
    let mut count = 0;
    serde_json::to_writer(&mut gzip, header)?;
    for line in lines {
        gzip.write_all(b"\n")?;
        gzip.write_all(line.trim_ascii_end())?;
        count += 1;
    }
    gzip.write_all(b"\n")?;
    serde_json::to_writer(&mut gzip, &Line::<Raw>::End(End { lines: count }))?;
    gzip.write_all(b"\n")?;
    gzip.finish()?.flush()
}

/// Reads a recording within bounds, and checks that it is whole.
pub fn read(from: impl Read) -> Result<Recording, ReadError> {
    let text = GzDecoder::new(BufReader::new(from));
    let mut text = BufReader::new(text.take(RECORDING_BYTES_MAX));
    let first = next(&mut text, true)?.ok_or(ReadError::NotARecording)?;
    let header = header(&first)?;
    let mut lines = Vec::new();
    while let Some(line) = next(&mut text, false)? {
        let number = lines.len() + 2;
        match parse_line(number, &line)? {
            Line::End(End { lines: count }) if count == lines.len() as u64 => {
                return match next(&mut text, false)? {
                    None => Ok(Recording { header, lines }),
                    Some(_) => Err(ReadError::Line {
                        number: number + 1,
                        why: "it is after the last one".to_owned(),
                    }),
                };
            }
            Line::End(_) => return Err(ReadError::Truncated),
            line => lines.push(line),
        }
    }
    if text.get_ref().limit() == 0 { Err(ReadError::TooLarge) } else { Err(ReadError::Truncated) }
}

/// Reads the lines of a recording that is not a file yet.
pub fn parse<'a>(header: Header, lines: impl IntoIterator<Item = &'a [u8]>) -> Result<Recording, ReadError> {
    let lines = lines.into_iter().enumerate().map(|(index, line)| parse_line(index + 2, line));
    Ok(Recording { header, lines: lines.collect::<Result<_, _>>()? })
}

fn parse_line(number: usize, line: &[u8]) -> Result<Line, ReadError> {
    serde_json::from_slice(line).map_err(|error| ReadError::Line { number, why: error.to_string() })
}

fn header(line: &[u8]) -> Result<Header, ReadError> {
    #[derive(Deserialize)]
    struct Format {
        format: String,
    }
    let Format { format } = serde_json::from_slice(line).map_err(|_| ReadError::NotARecording)?;
    if format != FORMAT {
        return Err(ReadError::Format(format.chars().take(64).collect()));
    }
    serde_json::from_slice(line).map_err(|error| ReadError::Line { number: 1, why: error.to_string() })
}

/// The next line, none at the end.
fn next(text: &mut impl BufRead, is_first: bool) -> Result<Option<Vec<u8>>, ReadError> {
    let mut line = Vec::new();
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::UnexpectedEof => ReadError::Truncated,
        io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData if is_first => ReadError::NotARecording,
        _ => ReadError::Io(error),
    };
    let read = text.take(LINE_BYTES_MAX).read_until(b'\n', &mut line).map_err(failed)?;
    if read as u64 == LINE_BYTES_MAX {
        return Err(ReadError::TooLarge);
    }
    Ok((read > 0).then_some(line))
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let redacted = if self.is_redacted { ", redacted" } else { "" };
        write!(f, "{} recorded by nodedock {}{redacted}", self.driver, self.nodedock)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recording::Revision;

    fn a_header() -> Header {
        Header {
            format: FORMAT.to_owned(),
            driver: "gpu.example.com".to_owned(),
            nodedock: "0.1.0".to_owned(),
            is_redacted: false,
        }
    }

    fn written(header: &Header, lines: &[Line]) -> Vec<u8> {
        let lines: Vec<_> = lines.iter().map(|line| serde_json::to_vec(line).unwrap()).collect();
        let mut bytes = Vec::new();
        write(header, lines.iter().map(Vec::as_slice), &mut bytes).unwrap();
        bytes
    }

    fn gzip(text: &str) -> Vec<u8> {
        let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
        gzip.write_all(text.as_bytes()).unwrap();
        gzip.finish().unwrap()
    }

    #[test]
    fn a_recording_is_read_as_it_was_written() {
        let lines = vec![Line::Revision(Revision::native("gpu.example.com")), Line::Lost(3)];
        let read = read(written(&a_header(), &lines).as_slice()).unwrap();
        assert_eq!(read, Recording { header: a_header(), lines });
    }

    #[test]
    fn a_bad_file_is_refused_in_one_sentence_wherever_it_is_cut() {
        let whole = written(&a_header(), &[Line::Lost(3), Line::Lost(4)]);
        for end in 0..whole.len() {
            let error = read(&whole[..end]).unwrap_err().to_string();
            assert!(
                error == "it is truncated" || error.starts_with("it is not a recording"),
                "{end}: {error}"
            );
        }
        let head = serde_json::to_string(&a_header()).unwrap();
        for (bytes, expected) in [
            (b"PK\x03\x04 something else".to_vec(), "it is not a recording"),
            (gzip("{}\n"), "it is not a recording"),
            (gzip("{\"format\":\"nodedock-recording/2\"}\n"), "the format \"nodedock-recording/2\""),
            (gzip("{\"format\":\"nodedock-recording/1\"}\n"), "line 1 is not valid: missing field"),
            (gzip(&format!("{head}\n{{\"x\":1}}\n")), "line 2 is not valid: unknown variant"),
            (gzip(&format!("{head}\n{{\"lost\":1}}\n")), "it is truncated"),
            (gzip(&format!("{head}\n{{\"end\":{{\"lines\":1}}}}\n")), "it is truncated"),
            (gzip(&format!("{head}\n{{\"end\":{{\"lines\":0}}}}\nx\n")), "line 3 is not valid: it is after"),
        ] {
            let error = read(bytes.as_slice()).unwrap_err().to_string();
            assert!(error.contains(expected), "{expected}: {error}");
        }
    }
}
