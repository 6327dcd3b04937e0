//! A compiled driver as it comes from a compiler and lies in the cache: code, a report, and a seal over both.
//!
//! The code comes first, so that the file can be mapped as it is. It is run as native code in this process, therefore nothing is
//! taken from a file before its seal was held against all of it, and what is mapped is the open file that was looked at.

use std::fs::File;
use std::hash::{Hash, Hasher};
use std::io::{self, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use wasmtime::Engine;
use wasmtime::component::Component;

use super::admission::{CONTRACT_VERSION, LoadError, Surface};
use nodedock_model::limit::{COMPILED_BYTES_MAX, DRIVER_REPORT_BYTES_MAX};

const MAGIC: [u8; 8] = *b"NODEDOCK";
/// Of the seal and the report. Another makes another file.
const FORMAT: u8 = 1;
/// The magic, the lengths of code and report, the digests of source and settings, and the digest of all that comes before it.
const SEAL_BYTES: usize = 8 + 8 + 8 + 32 + 32 + SUM_BYTES as usize;
const BLOCK_BYTES: usize = 64 << 10;

/// A SHA-256.
type Sum = [u8; 32];
const SUM_BYTES: u64 = 32;

/// From what, and by whose rules, something was compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Key {
    pub(super) source: Sum,
    pub(super) settings: Sum,
}

impl Key {
    pub(super) fn new(engine: &Engine, source: &[u8]) -> Self {
        Self { source: Sha256::digest(source).into(), settings: settings(engine) }
    }

    /// The source's digest: `sha256:` and hex.
    pub(super) fn digest(&self) -> String {
        format!("sha256:{}", hex::encode(self.source))
    }
}

/// A digest of the engine's version and settings, and of our own.
pub(super) fn settings(engine: &Engine) -> Sum {
    let mut settings = Settings(Sha256::new());
    engine.precompile_compatibility_hash().hash(&mut settings);
    settings.0.update(env!("CARGO_PKG_VERSION"));
    settings.0.update(CONTRACT_VERSION);
    settings.0.update([FORMAT]);
    settings.0.finalize().into()
}

/// Makes a digest of what a type hashes: the standard hasher may give other values after an update of the compiler.
struct Settings(Sha256);

impl Hasher for Settings {
    fn write(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    fn finish(&self) -> u64 {
        unreachable!("the digest is taken from the hasher itself")
    }
}

/// What a compiler says of a file.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Report {
    pub(super) surface: Surface,
    /// Why there is no code.
    pub(super) refusal: Option<LoadError>,
    pub(super) spent: Spent,
}

/// What a process has taken so far.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Spent {
    pub(super) cpu_ms: u64,
    pub(super) memory_peak_mib: u64,
}

/// What is wrong with a file that should be a compiled driver.
#[derive(Debug, thiserror::Error)]
pub(super) enum Flaw {
    #[error("it cannot be read")]
    Read(#[from] io::Error),
    #[error("it has {0} bytes")]
    TooLarge(u64),
    #[error("it is cut off, or no compiled driver at all")]
    Cut,
    #[error("it was compiled from another file")]
    OtherSource,
    #[error("it was compiled by another version, or with other settings")]
    OtherSettings,
    #[error("its digest is another")]
    Damaged,
    #[error("its report cannot be read")]
    Report(#[from] serde_json::Error),
    #[error("it is no regular file")]
    NotAFile,
    #[error("it belongs to user {owner}, not to this daemon's ({us})")]
    Foreign { owner: u32, us: u32 },
    #[error("it has mode {0:o} or a second name, by which others may get at it")]
    Open(u32),
    #[error("it has no code")]
    NoCode,
    #[error("the engine does not take it: {0}")]
    Engine(String),
}

/// A file that was held against its seal, open.
#[derive(Debug)]
pub(super) struct Artifact {
    file: File,
    pub(super) report: Report,
    pub(super) code_bytes: u64,
}

impl Artifact {
    /// Reads all of a file once, in small blocks.
    pub(super) fn check(file: File, key: &Key) -> Result<Self, Flaw> {
        let length = file.metadata()?.len();
        let whole_max = COMPILED_BYTES_MAX + (DRIVER_REPORT_BYTES_MAX + SEAL_BYTES) as u64;
        if length > whole_max {
            return Err(Flaw::TooLarge(length));
        }
        let end = length.checked_sub(SEAL_BYTES as u64).ok_or(Flaw::Cut)?;
        let mut bytes = [0; SEAL_BYTES];
        file.read_exact_at(&mut bytes, end)?;
        let seal = Seal::read(&bytes).ok_or(Flaw::Cut)?;
        seal.check(key, end)?;
        if digest(&file, length - SUM_BYTES)? != seal.digest {
            return Err(Flaw::Damaged);
        }
        let report_bytes = usize::try_from(seal.report).map_err(|_| Flaw::Cut)?;
        let mut report = vec![0; report_bytes.min(DRIVER_REPORT_BYTES_MAX)];
        file.read_exact_at(&mut report, seal.code)?;
        Ok(Self { report: serde_json::from_slice(&report)?, code_bytes: seal.code, file })
    }

    /// Maps the code: pages that nobody uses cost no memory. Where files of that disk may not be run (`noexec`), it is taken from
    /// a copy in memory.
    pub(super) fn map(&self, engine: &Engine) -> Result<Component, Flaw> {
        let mapped = map(engine, &self.file).or_else(|error| match self.copy_in_memory() {
            Ok(copy) => map(engine, &copy),
            Err(_) => Err(error),
        });
        mapped.map_err(|error| Flaw::Engine(format!("{error:#}")))
    }

    /// Writes the whole file to another.
    pub(super) fn copy_to(&self, mut to: &File) -> io::Result<()> {
        let mut from = &self.file;
        from.rewind()?;
        io::copy(&mut from, &mut to).map(drop)
    }

    /// The same, when it lies elsewhere.
    pub(super) fn in_file(self, file: File) -> Self {
        Self { file, ..self }
    }

    fn copy_in_memory(&self) -> io::Result<File> {
        let copy = memory_file()?;
        self.copy_to(&copy)?;
        Ok(copy)
    }
}

/// A file that is nowhere but in memory, and not in this process' own.
pub(super) fn memory_file() -> io::Result<File> {
    Ok(rustix::fs::memfd_create("nodedock-compiled", rustix::fs::MemfdFlags::CLOEXEC)?.into())
}

fn map(engine: &Engine, file: &File) -> wasmtime::Result<Component> {
    // The open file itself under a name: whatever was put at its path since is not looked at.
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    // SAFETY: the bytes are those that this program's own compiler made with this engine's settings, and its seal was held
    // against them. They are in memory that only this process has, or in a file of ours that nobody else may write to, in a folder
    // that nobody else may write to, and which we never change. Wasmtime itself refuses code of another version or settings.
    unsafe { Component::deserialize_file(engine, path) }
}

fn digest(file: &File, length: u64) -> io::Result<Sum> {
    let (mut sha, mut buffer, mut at) = (Sha256::new(), vec![0; BLOCK_BYTES], 0);
    while at < length {
        let wanted = usize::try_from(length - at).map_or(BLOCK_BYTES, |left| left.min(BLOCK_BYTES));
        file.read_exact_at(&mut buffer[..wanted], at)?;
        sha.update(&buffer[..wanted]);
        at += wanted as u64;
    }
    Ok(sha.finalize().into())
}

struct Seal {
    magic: [u8; 8],
    code: u64,
    report: u64,
    key: Key,
    digest: Sum,
}

impl Seal {
    fn read(bytes: &[u8]) -> Option<Self> {
        let (magic, rest) = bytes.split_first_chunk()?;
        let (code, rest) = rest.split_first_chunk()?;
        let (report, rest) = rest.split_first_chunk()?;
        let (source, rest) = rest.split_first_chunk()?;
        let (settings, rest) = rest.split_first_chunk()?;
        let key = Key { source: *source, settings: *settings };
        let (code, report) = (u64::from_le_bytes(*code), u64::from_le_bytes(*report));
        Some(Self { magic: *magic, code, report, key, digest: *rest.first_chunk()? })
    }

    fn check(&self, key: &Key, end: u64) -> Result<(), Flaw> {
        if self.magic != MAGIC || self.code.checked_add(self.report) != Some(end) {
            return Err(Flaw::Cut);
        }
        if self.key.settings != key.settings {
            return Err(Flaw::OtherSettings);
        }
        if self.key.source != key.source {
            return Err(Flaw::OtherSource);
        }
        Ok(())
    }
}

/// Writes what was compiled, and seals it.
pub(super) fn write(out: impl Write, key: &Key, code: &[u8], report: &Report) -> io::Result<()> {
    let mut text = serde_json::to_vec(report)?;
    if text.len() > DRIVER_REPORT_BYTES_MAX {
        let what = format!("has {} bytes of names of imports and exports", text.len());
        let refusal = Some(LoadError::TooComplex { what, max: DRIVER_REPORT_BYTES_MAX });
        text = serde_json::to_vec(&Report { surface: Surface::default(), refusal, spent: report.spent })?;
    }
    let mut sealing = Sealing { out, sha: Sha256::new() };
    sealing.put(code)?;
    sealing.put(&text)?;
    sealing.put(&MAGIC)?;
    sealing.put(&(code.len() as u64).to_le_bytes())?;
    sealing.put(&(text.len() as u64).to_le_bytes())?;
    sealing.put(&key.source)?;
    sealing.put(&key.settings)?;
    let digest: Sum = sealing.sha.finalize().into();
    sealing.out.write_all(&digest)?;
    sealing.out.flush()
}

struct Sealing<W> {
    out: W,
    sha: Sha256,
}

impl<W: Write> Sealing<W> {
    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.sha.update(bytes);
        self.out.write_all(bytes)
    }
}
