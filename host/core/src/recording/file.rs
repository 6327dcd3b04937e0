//! The format `nodedock-recording/1`: gzip of JSON lines. The first line is the header, the last one says how many are between.

use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Take, Write};

use flate2::Compression;
use flate2::bufread::GzDecoder;
use flate2::write::GzEncoder;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::ring::SEGMENTS;
use super::{End, Line, RING_BYTES_MAX, Raw};
use nodedock_model::limit::DRIVER_FILE_BYTES_MAX;

/// The format's name and version.
pub const FORMAT: &str = "nodedock-recording/1";

/// Bytes of a line with a call or a revision: a segment of the largest ring, and half of it for short values that a redaction made longer.
pub const CALL_LINE_BYTES_MAX: u64 = RING_BYTES_MAX / SEGMENTS * 3 / 2;
/// Bytes of a line with a driver's file: base64 of the largest one, and what is around it.
const FILE_LINE_BYTES_MAX: u64 = DRIVER_FILE_BYTES_MAX / 3 * 4 + 4096;
/// Bytes of a recording that is read, without compression: a ring of the largest size, and some drivers' files.
pub const RECORDING_BYTES_MAX: u64 = 256 << 20;
/// Beginning of a line with a driver's file, as [`write`] is given it.
const FILE_LINE: &[u8] = b"{\"file\":";
/// Bytes of the header.
const HEADER_BYTES_MAX: u64 = 4096;

/// The first line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Header {
    pub format: String,
    /// The recorded driver, or the extended resource of a device plugin.
    pub driver: String,
    /// Version of the daemon.
    pub nodedock: String,
    /// Values of fields that may have secrets are left out. Without it the recording has them.
    pub is_redacted: bool,
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
    #[error("line {number} has more than {bytes_max} bytes")]
    LongLine { number: u64, bytes_max: u64 },
    #[error("line {number} is not valid: {why}")]
    Line { number: u64, why: String },
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

/// Reads a recording line by line. In memory is the line that was read last, as far as the caller keeps no other.
pub struct Reader<R> {
    text: BufReader<Take<GzDecoder<BufReader<R>>>>,
    header: Header,
    /// Lines that were read after the header.
    lines: u64,
    is_whole: bool,
}

impl<R: Read> Reader<R> {
    /// Reads the header.
    pub fn new(from: R) -> Result<Self, ReadError> {
        let text = GzDecoder::new(BufReader::new(from));
        let mut text = BufReader::new(text.take(RECORDING_BYTES_MAX));
        let first = read_line(&mut text, 1)?.ok_or(ReadError::NotARecording)?;
        Ok(Self {
            text,
            header: header(&first)?,
            lines: 0,
            is_whole: false,
        })
    }

    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Returns the next line, none after the last one. Fails at the end if the recording is not whole.
    pub fn next_line(&mut self) -> Result<Option<Line<Raw>>, ReadError> {
        let number = self.lines + 2;
        let Some(line) = read_line(&mut self.text, number)? else {
            return match (self.is_whole, self.text.get_ref().limit()) {
                (true, _) => Ok(None),
                (false, 0) => Err(ReadError::TooLarge),
                (false, _) => Err(ReadError::Truncated),
            };
        };
        if self.is_whole {
            return Err(ReadError::Line {
                number,
                why: "it is after the last one".to_owned(),
            });
        }
        let parsed = parse_line(number, &line)?;
        drop(line);
        if let Line::End(End { lines }) = parsed {
            if lines != self.lines {
                return Err(ReadError::Truncated);
            }
            self.lines += 1;
            self.is_whole = true;
            return self.next_line();
        }
        self.lines += 1;
        Ok(Some(parsed))
    }
}

/// Parses a line of a recording that has this number.
pub(super) fn parse_line<V: DeserializeOwned>(
    number: u64,
    line: &[u8],
) -> Result<Line<V>, ReadError> {
    serde_json::from_slice(line).map_err(|error| ReadError::Line {
        number,
        why: error.to_string(),
    })
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
    serde_json::from_slice(line).map_err(|error| ReadError::Line {
        number: 1,
        why: error.to_string(),
    })
}

/// The next line, none at the end. Only a driver's file may be longer than a call.
fn read_line(text: &mut impl BufRead, number: u64) -> Result<Option<Vec<u8>>, ReadError> {
    let mut line = Vec::new();
    let mut bytes_max = if number == 1 {
        HEADER_BYTES_MAX
    } else {
        CALL_LINE_BYTES_MAX
    };
    read_until(text, bytes_max, number, &mut line)?;
    if line.len() as u64 == bytes_max && line.starts_with(FILE_LINE) {
        read_until(text, FILE_LINE_BYTES_MAX - bytes_max, number, &mut line)?;
        bytes_max = FILE_LINE_BYTES_MAX;
    }
    if line.len() as u64 == bytes_max && !line.ends_with(b"\n") {
        return Err(ReadError::LongLine { number, bytes_max });
    }
    Ok((!line.is_empty()).then_some(line))
}

fn read_until(
    text: &mut impl BufRead,
    bytes: u64,
    number: u64,
    line: &mut Vec<u8>,
) -> Result<(), ReadError> {
    text.take(bytes)
        .read_until(b'\n', line)
        .map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => ReadError::Truncated,
            io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData if number == 1 => {
                ReadError::NotARecording
            }
            _ => ReadError::Io(error),
        })?;
    Ok(())
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let secrets = match self.is_redacted {
            true => "redacted",
            false => "not redacted: it may have secrets",
        };
        write!(
            f,
            "{} recorded by nodedock {}, {secrets}",
            self.driver, self.nodedock
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recording::{DriverFile, Revision};

    fn a_header() -> Header {
        Header {
            format: FORMAT.to_owned(),
            driver: "gpu.example.com".to_owned(),
            nodedock: "0.1.0".to_owned(),
            is_redacted: false,
        }
    }

    fn written(header: &Header, lines: &[Line]) -> Vec<u8> {
        let lines: Vec<_> = lines
            .iter()
            .map(|line| serde_json::to_vec(line).unwrap())
            .collect();
        let mut bytes = Vec::new();
        write(header, lines.iter().map(Vec::as_slice), &mut bytes).unwrap();
        bytes
    }

    fn read(bytes: impl Read) -> Result<(Header, Vec<Line<Raw>>), ReadError> {
        let mut reader = Reader::new(bytes)?;
        let mut lines = Vec::new();
        while let Some(line) = reader.next_line()? {
            lines.push(line);
        }
        Ok((reader.header().clone(), lines))
    }

    /// A recording that does not end, of one text again and again behind the header.
    fn endless(line: &str) -> impl Read {
        struct Endless(Vec<u8>, usize);
        impl Read for Endless {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                for byte in &mut *buffer {
                    *byte = self.0[self.1 % self.0.len()];
                    self.1 += 1;
                }
                Ok(buffer.len())
            }
        }
        let head = format!("{}\n", serde_json::to_string(&a_header()).unwrap());
        let text = head.as_bytes().to_vec();
        let text = io::Cursor::new(text).chain(Endless(line.as_bytes().to_vec(), 0));
        flate2::read::GzEncoder::new(text, Compression::fast())
    }

    fn gzip(text: &str) -> Vec<u8> {
        let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
        gzip.write_all(text.as_bytes()).unwrap();
        gzip.finish().unwrap()
    }

    #[test]
    fn recording_is_read_as_written() {
        let lines = vec![
            Line::Revision(Revision::native("gpu.example.com")),
            Line::Lost(3),
        ];
        let (header, read) = read(written(&a_header(), &lines).as_slice()).unwrap();
        assert_eq!(header, a_header());
        assert_eq!(
            serde_json::to_value(read).unwrap(),
            serde_json::to_value(lines).unwrap()
        );
    }

    #[test]
    fn endless_recording_is_refused() {
        let mut reader = Reader::new(endless("{\"lost\":1}\n")).unwrap();
        let error = loop {
            match reader.next_line() {
                Ok(line) => assert!(line.is_some()),
                Err(error) => break error.to_string(),
            }
        };
        // The bound may be in the middle of a line.
        assert!(
            error == "it is larger than 256 MiB without compression" || error.contains("EOF"),
            "{error}"
        );
    }

    #[test]
    fn only_driver_files_exceed_call_bound() {
        let call = read(endless("[[],")).unwrap_err().to_string();
        assert_eq!(call, "line 2 has more than 12582912 bytes");
        let other = read(endless("{\"call\":")).unwrap_err().to_string();
        assert_eq!(other, call);
        let file = read(endless("{\"file\":")).unwrap_err().to_string();
        assert_eq!(
            file,
            format!("line 2 has more than {FILE_LINE_BYTES_MAX} bytes")
        );
        let largest = "A".repeat(CALL_LINE_BYTES_MAX as usize * 2);
        let file = DriverFile {
            digest: "sha256:00".to_owned(),
            base64: largest,
        };
        let (_, lines) =
            read(written(&a_header(), &[Line::File(file.clone())]).as_slice()).unwrap();
        assert!(matches!(&lines[..], [Line::File(found)] if *found == file));
        let header = gzip(&format!(
            "{{\"format\":\"{}\"}}",
            " ".repeat(HEADER_BYTES_MAX as usize)
        ));
        assert_eq!(
            read(header.as_slice()).unwrap_err().to_string(),
            "line 1 has more than 4096 bytes"
        );
    }

    #[test]
    fn truncated_or_foreign_file_is_refused() {
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
            (
                b"PK\x03\x04 something else".to_vec(),
                "it is not a recording",
            ),
            (gzip("{}\n"), "it is not a recording"),
            (
                gzip("{\"format\":\"nodedock-recording/2\"}\n"),
                "the format \"nodedock-recording/2\"",
            ),
            (
                gzip("{\"format\":\"nodedock-recording/1\"}\n"),
                "line 1 is not valid: missing field",
            ),
            (
                gzip(&format!("{head}\n{{\"x\":1}}\n")),
                "line 2 is not valid: unknown variant",
            ),
            (
                gzip(&format!("{head}\n{{\"lost\":1}}\n")),
                "it is truncated",
            ),
            (
                gzip(&format!("{head}\n{{\"end\":{{\"lines\":1}}}}\n")),
                "it is truncated",
            ),
            (
                gzip(&format!("{head}\n{{\"end\":{{\"lines\":0}}}}\nx\n")),
                "line 3 is not valid: it is after",
            ),
        ] {
            let error = read(bytes.as_slice()).unwrap_err().to_string();
            assert!(error.contains(expected), "{expected}: {error}");
        }
    }
}
