//! A compiled driver as the compiler writes it and the cache keeps it: code, a report, and a seal over both.
//!
//! The code comes first, so that the file can be mapped as it is. It runs as native code in this process: nothing of a file is used
//! before its seal is verified, and the file that is mapped is the open file that was verified. A file of the cache is sealed with a key
//! that only the daemon has. The compiler's process has no key: its parent reads what it wrote from a pipe that no other process has.

use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use wasmtime::Engine;
use wasmtime::component::Component;

use crate::digest_text;
use crate::load::admission::{CODE_BYTES_MAX, CONTRACT_VERSION, LoadError, Surface};

/// Version of the layout below. A change makes files of another name.
const FORMAT: u8 = 3;
/// Names of what a driver imports and exports, as they are shown to people: real ones have 2 kB.
pub(crate) const REPORT_BYTES_MAX: usize = 256 << 10;
/// Bytes after code and report: the length of the code, and an HMAC-SHA256 of the compiled input and everything before.
const SEAL_BYTES: usize = 8 + SUM_BYTES;
const SUM_BYTES: usize = 32;
pub(crate) const ARTIFACT_BYTES_MAX: u64 = CODE_BYTES_MAX + (REPORT_BYTES_MAX + SEAL_BYTES) as u64;

/// Source and settings of a compilation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Key {
    /// SHA-256 of the driver's file.
    pub(crate) source: [u8; 32],
    pub(crate) settings: u64,
}

impl Key {
    pub(crate) fn new(engine: &Engine, source: &[u8]) -> Self {
        Self {
            source: Sha256::digest(source).into(),
            settings: settings(engine),
        }
    }

    /// The source's digest: `sha256:` and hex.
    pub(crate) fn digest(&self) -> String {
        digest_text(&self.source)
    }
}

/// The key of a seal.
#[derive(Clone)]
pub(crate) struct SealKey([u8; SEAL_KEY_BYTES]);

pub(crate) const SEAL_KEY_BYTES: usize = 32;

impl SealKey {
    /// Key for an artifact in a pipe: the seal shows that it is whole, but does not authenticate its maker.
    pub(crate) const OF_PIPE: Self = Self([0; SEAL_KEY_BYTES]);

    pub(crate) fn random() -> io::Result<Self> {
        let mut key = [0; SEAL_KEY_BYTES];
        getrandom::fill(&mut key).map_err(io::Error::other)?;
        Ok(Self(key))
    }

    /// None: the bytes have another length.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().map(Self).ok()
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// A seal to which the artifact's bytes are still to be added.
    fn seal(&self, key: &Key) -> Hmac<Sha256> {
        let seal = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes a key of any length");
        seal.chain_update(key.source)
            .chain_update(key.settings.to_le_bytes())
    }
}

/// A hash of the engine's version and settings, and of our own. Built by another Rust compiler, this program may have another hash: then it
/// compiles drivers again.
pub(crate) fn settings(engine: &Engine) -> u64 {
    let mut hasher = DefaultHasher::new();
    engine.precompile_compatibility_hash().hash(&mut hasher);
    (env!("CARGO_PKG_VERSION"), CONTRACT_VERSION, FORMAT).hash(&mut hasher);
    hasher.finish()
}

/// The compiler's report about a file.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) surface: Surface,
    /// Why there is no code.
    pub(crate) refusal: Option<LoadError>,
    pub(crate) spent: Spent,
}

/// Resources that the compiler's process used.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Spent {
    pub(crate) cpu_ms: u64,
    pub(crate) memory_peak_mib: u64,
}

/// Why a file is not used as a compiled driver.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ArtifactError {
    #[error("it cannot be read")]
    Read(#[from] io::Error),
    #[error("it is cut off or damaged, or was compiled from another file or by another version")]
    Seal,
    #[error(
        "it is not a regular file of this daemon's user that only this user can write, under one name"
    )]
    NotPrivate,
    #[error("it has no code")]
    NoCode,
    #[error("the engine does not load it: {0}")]
    Engine(String),
}

/// An open file whose seal was verified.
#[derive(Debug)]
pub(crate) struct Artifact {
    file: File,
    pub(crate) report: Report,
    pub(crate) code_bytes: u64,
}

impl Artifact {
    /// Reads all of a file once, in small blocks, and verifies its seal.
    pub(crate) fn verify(
        mut file: File,
        key: &Key,
        seal_key: &SealKey,
    ) -> Result<Self, ArtifactError> {
        let length = file.metadata()?.len();
        let end = length
            .checked_sub(SEAL_BYTES as u64)
            .filter(|_| length <= ARTIFACT_BYTES_MAX);
        let end = end.ok_or(ArtifactError::Seal)?;
        file.rewind()?;
        let found = copy_sealed(seal_key.seal(key), (&file).take(end + 8), io::sink())?;
        let mut seal = [0; SEAL_BYTES];
        file.read_exact_at(&mut seal, end)?;
        let (code_bytes, sum) = seal.split_first_chunk().ok_or(ArtifactError::Seal)?;
        found.verify_slice(sum).map_err(|_| ArtifactError::Seal)?;
        let code_bytes = u64::from_le_bytes(*code_bytes);
        let report_bytes = end
            .checked_sub(code_bytes)
            .and_then(|bytes| usize::try_from(bytes).ok());
        let mut report = vec![0; report_bytes.unwrap_or(0).min(REPORT_BYTES_MAX)];
        file.read_exact_at(&mut report, code_bytes)?;
        let report = serde_json::from_slice(&report).map_err(|_| ArtifactError::Seal)?;
        Ok(Self {
            file,
            report,
            code_bytes,
        })
    }

    /// Maps the code: unused pages cost no memory. Where the file system is mounted `noexec`, a copy in memory is mapped.
    pub(crate) fn map(&self, engine: &Engine) -> wasmtime::Result<Component> {
        map(engine, &self.file).or_else(|error| {
            let copied = memory_file().and_then(|copy| self.copy_to(&copy).map(|()| copy));
            copied.map_or(Err(error), |copy| map(engine, &copy))
        })
    }

    fn copy_to(&self, mut to: &File) -> io::Result<()> {
        let mut from = &self.file;
        from.rewind()?;
        io::copy(&mut from, &mut to).map(drop)
    }

    /// Writes the artifact to another file with the seal of a key.
    pub(crate) fn seal_to(&self, mut to: &File, key: &Key, seal_key: &SealKey) -> io::Result<()> {
        let mut from = &self.file;
        let sealed = from.metadata()?.len() - SUM_BYTES as u64;
        from.rewind()?;
        let seal = copy_sealed(seal_key.seal(key), from.take(sealed), to)?;
        to.write_all(&seal.finalize().into_bytes())
    }

    /// The same artifact in a file that `seal_to` wrote.
    pub(crate) fn in_file(self, file: File) -> Self {
        Self { file, ..self }
    }
}

/// A file in memory, which has no name and does not count as this process' own memory.
pub(crate) fn memory_file() -> io::Result<File> {
    Ok(rustix::fs::memfd_create("nodedock-compiled", rustix::fs::MemfdFlags::CLOEXEC)?.into())
}

fn map(engine: &Engine, file: &File) -> wasmtime::Result<Component> {
    // The path names the open file itself, even if another file was put at its own path since.
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    // SAFETY: the bytes were made by this program's own compiler with this engine's settings, and their seal was verified. They are in
    // memory that only this process has, or in a file of ours in a directory of ours, where no other user can write, sealed with a key
    // that only this daemon has, and we never change them. Wasmtime itself refuses code of another version or with other settings.
    unsafe { Component::deserialize_file(engine, path) }
}

/// Copies everything, and adds it to a seal.
fn copy_sealed(
    mut seal: Hmac<Sha256>,
    mut from: impl Read,
    mut to: impl Write,
) -> io::Result<Hmac<Sha256>> {
    let mut buffer = vec![0; 64 << 10];
    loop {
        match from.read(&mut buffer)? {
            0 => return Ok(seal),
            count => {
                seal.update(&buffer[..count]);
                to.write_all(&buffer[..count])?;
            }
        }
    }
}

/// Writes compiled code and its report to a pipe, and seals them.
pub(crate) fn write(
    mut out: impl Write,
    key: &Key,
    code: &[u8],
    report: &Report,
) -> io::Result<()> {
    let mut text = serde_json::to_vec(report)?;
    if text.len() > REPORT_BYTES_MAX {
        let what = format!("has {} bytes of names of imports and exports", text.len());
        let refusal = Some(LoadError::TooComplex {
            what,
            max: REPORT_BYTES_MAX,
        });
        text = serde_json::to_vec(&Report {
            surface: Surface::default(),
            refusal,
            spent: report.spent,
        })?;
    }
    let mut seal = SealKey::OF_PIPE.seal(key);
    for part in [code, &text, &(code.len() as u64).to_le_bytes()] {
        seal.update(part);
        out.write_all(part)?;
    }
    out.write_all(&seal.finalize().into_bytes())?;
    out.flush()
}
