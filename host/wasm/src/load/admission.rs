//! Checks whether a file can be a driver, before it is compiled.
//!
//! Is given bytes; returns a component of our contract, or an error that says whose fault it is and what to do. The daemon itself reads the
//! first bytes only (`form`); everything else runs in the compiler's process.

mod bulk;

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::panic::catch_unwind;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use wasmparser::{Encoding, Parser, Payload, Validator, WasmFeatures};
use wit_component::ComponentEncoder;

use crate::host_functions::wasi;
use crate::limits::call_failure::CallFailure;
use crate::load::wit_packages::WitPackages;
use nodedock_base::printable::one_line;
use nodedock_model::ProblemCode;
use nodedock_model::limit::DRIVER_FILE_BYTES_MAX;

/// The package of the contract, and the version that this host was built with.
pub(crate) const CONTRACT: &str = "nodedock:driver";
pub(crate) const CONTRACT_VERSION: &str = "0.2.0";
/// Compiled code: two to three times its source.
pub(crate) const CODE_BYTES_MAX: u64 = 256 << 20;
const CAPABILITIES: &[&str] = &[
    "claims",
    "common",
    "container-edits",
    "device-nodes",
    "host-files",
    "inventory",
    "log",
    "net-interfaces",
    "pci-driver",
    "prepared-claims",
    "progress",
    "sysfs",
    "sysfs-write",
];
const REQUIRED: &[&str] = &["identity", "discovery", "preparation"];
const FACETS: &[&str] = &[
    "configuration",
    "health",
    "left-out",
    "scheduling",
    "telemetry",
];
/// Names that an error lists.
const NAMES_SHOWN: usize = 8;
/// Imports and exports of a component: drivers of Python have some thirty.
const NAMES_MAX: usize = 1000;
/// Bytes of a tool's message about a file: it contains names from the file.
const LINE_BYTES_MAX: usize = 512;

nodedock_base::worded! {
    /// The two forms of driver files.
    #[derive(Serialize, Deserialize)]
    Form {
        /// Made by `--target wasm32-unknown-unknown`.
        CoreModule = "core module",
        /// Made by `--target wasm32-wasip2` and the tools of other languages.
        Component = "component",
    }
}

nodedock_base::worded! {
    /// Imports other than the contract's.
    Profile {
        /// Nothing.
        Pure = "pure",
        /// Interfaces of WASI 0.2, which are linked with nothing behind them.
        Wasi = "wasi",
    }
}

/// Why a file is not a driver that this host can run. The compiler's process sends it to the daemon.
#[derive(Debug, thiserror::Error, Serialize, Deserialize)]
pub enum LoadError {
    #[error("the file is empty")]
    Empty,
    #[error("the file has {0} bytes, at most {DRIVER_FILE_BYTES_MAX} are allowed")]
    TooLarge(usize),
    #[error("the file is not WebAssembly: it starts with {0}")]
    NotWasm(String),
    #[error("the file is WebAssembly text: translate it first (wasm-tools parse)")]
    Text,
    #[error(
        "the file is precompiled code (ELF, .cwasm), which is never taken: drop the .wasm file that it was made from"
    )]
    Precompiled,
    #[error("the file is WebAssembly of unknown kind (version {0:#x})")]
    Encoding(u32),
    #[error("the file is not valid WebAssembly: {message} (at byte {offset:#x} of {size})")]
    Invalid {
        message: String,
        offset: usize,
        size: usize,
    },
    #[error("the file ends at byte {size}, in the middle of a part: it was cut off")]
    Truncated { size: usize },
    #[error(
        "the core module has no WIT inside: build it with the nodedock SDK or wit-bindgen, or hand in a component"
    )]
    NoContract,
    #[error("the core module cannot be made a component: {0}")]
    Encode(String),
    #[error("the driver imports what this host does not have: {names}{hint}")]
    UnknownImports {
        names: String,
        hint: Cow<'static, str>,
    },
    #[error(
        "the driver was built against {found}, and this host supports {CONTRACT}@0.2.x: build it with a matching SDK"
    )]
    ContractVersion { found: String },
    #[error(
        "the driver lacks {missing}: every driver exports identity, discovery and preparation of {CONTRACT}@0.2.x"
    )]
    MissingExports { missing: String },
    #[error("the component has {0} imports and exports, at most {NAMES_MAX} are allowed")]
    TooManyNames(usize),
    #[error("the file is composed of several components, which is not taken: hand in one driver")]
    Composed,
    #[error("the driver's types are not those of the contract: {0}")]
    Types(String),
    #[error(
        "the file {what}, at most {max} are taken: build it for size, or leave out what it does not need"
    )]
    TooComplex { what: String, max: usize },
    #[error("the driver cannot be compiled: {0}")]
    Compile(String),
    #[error(
        "compiling the driver takes more than the {0} MiB of memory that a compiler may have: build it for size, and look for a function that is huge"
    )]
    CompileMemory(u64),
    #[error(
        "compiling the driver takes more than {0:?} of CPU: build it for size, and look for a function that is huge"
    )]
    CompileCpu(Duration),
    #[error(
        "compiling the driver did not end within {0:?}: the node was busy, or the file is made to be slow; `nodedock driver reload` tries again"
    )]
    CompileTime(Duration),
    #[error("the compiled driver has more than {} MiB: build it for size", CODE_BYTES_MAX >> 20)]
    CompiledTooLarge,
    #[error(
        "the compiler was killed twice by signal {0}: the node is short of memory, or it was killed by hand; `nodedock driver reload` tries again"
    )]
    CompilerKilled(i32),
    #[error("describe failed: {0}")]
    #[serde(skip)]
    Describe(#[source] CallFailure),
    #[error("what describe says is refused: {0}")]
    Description(String),
    #[error("the host failed at it: {0}")]
    Host(String),
}

impl LoadError {
    /// A stable code.
    pub fn code(&self) -> ProblemCode {
        match self {
            Self::Empty => ProblemCode::FileEmpty,
            Self::TooLarge(_) => ProblemCode::FileTooLarge,
            Self::NotWasm(_) | Self::Encoding(_) => ProblemCode::NotWasm,
            Self::Text => ProblemCode::WasmText,
            Self::Precompiled => ProblemCode::Precompiled,
            Self::Invalid { .. } => ProblemCode::WasmInvalid,
            Self::Truncated { .. } => ProblemCode::WasmTruncated,
            Self::NoContract => ProblemCode::NoContract,
            Self::Encode(_) => ProblemCode::NotADriver,
            Self::UnknownImports { .. } => ProblemCode::UnknownImports,
            Self::ContractVersion { .. } => ProblemCode::ContractVersion,
            Self::MissingExports { .. } => ProblemCode::MissingExports,
            Self::TooManyNames(_) => ProblemCode::TooManyNames,
            Self::Composed => ProblemCode::Composed,
            Self::Types(_) => ProblemCode::ContractTypes,
            Self::TooComplex { .. } => ProblemCode::TooComplex,
            Self::Compile(_) => ProblemCode::CompileFailed,
            Self::CompileMemory(_) => ProblemCode::CompileMemory,
            Self::CompileCpu(_) => ProblemCode::CompileCpu,
            Self::CompileTime(_) => ProblemCode::CompileTime,
            Self::CompiledTooLarge => ProblemCode::CompiledTooLarge,
            Self::CompilerKilled(_) => ProblemCode::CompilerKilled,
            Self::Describe(_) => ProblemCode::DescribeFailed,
            Self::Description(_) => ProblemCode::DescriptionRefused,
            Self::Host(_) => ProblemCode::HostFailed,
        }
    }
}

/// A file's imports and exports, read without running it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Surface {
    pub form: Option<Form>,
    pub imports: BTreeSet<String>,
    pub exports: BTreeSet<String>,
}

impl Surface {
    /// The contract's version that the file was built against, such as `nodedock:driver@0.2.0`.
    pub fn contract(&self) -> Option<String> {
        let mut versions = self.exports.iter().chain(&self.imports).filter_map(|name| {
            let rest = name.strip_prefix(CONTRACT)?.strip_prefix('/')?;
            rest.split_once('@').map(|(_, version)| version)
        });
        versions
            .next()
            .map(|version| format!("{CONTRACT}@{version}"))
    }

    /// None: the file does not import or export the contract, and its imports may not all be known.
    pub fn profile(&self) -> Option<Profile> {
        self.contract()?;
        let is_wasi = self.imports.iter().any(|name| name.starts_with("wasi"));
        Some(if is_wasi {
            Profile::Wasi
        } else {
            Profile::Pure
        })
    }

    /// Optional interfaces that it exports.
    pub fn facets(&self) -> Vec<&'static str> {
        FACETS
            .iter()
            .copied()
            .filter(|facet| self.has_export(facet))
            .collect()
    }

    /// Returns true if it imports an interface of the contract.
    pub(crate) fn has_import(&self, interface: &str) -> bool {
        self.imports
            .iter()
            .any(|name| our_interface(name) == Some((interface, true)))
    }

    fn has_export(&self, interface: &str) -> bool {
        self.exports
            .iter()
            .any(|name| our_interface(name) == Some((interface, true)))
    }
}

/// Checks a file's form, size, validity and contract. Fills `surface` as far as it gets.
pub(crate) fn admit<'a>(
    bytes: &'a [u8],
    surface: &mut Surface,
) -> Result<Cow<'a, [u8]>, LoadError> {
    let form = form(bytes)?;
    surface.form = Some(form);
    bulk::check(bytes)?;
    validate(bytes)?;
    let component = match form {
        Form::Component => Cow::Borrowed(bytes),
        Form::CoreModule => Cow::Owned(componentize(bytes, surface)?),
    };
    let (names, is_composed) = read_names(&component);
    let count = names.imports.len() + names.exports.len();
    if count > NAMES_MAX {
        return Err(LoadError::TooManyNames(count));
    }
    *surface = Surface {
        form: Some(form),
        ..names
    };
    if is_composed {
        return Err(LoadError::Composed);
    }
    check_contract(surface)?;
    Ok(component)
}

/// The form of a file, by its first bytes and its size.
pub(crate) fn form(bytes: &[u8]) -> Result<Form, LoadError> {
    if bytes.is_empty() {
        return Err(LoadError::Empty);
    }
    if bytes.len() as u64 > DRIVER_FILE_BYTES_MAX {
        return Err(LoadError::TooLarge(bytes.len()));
    }
    if bytes.starts_with(b"\x7fELF") || wasmtime::Engine::detect_precompiled(bytes).is_some() {
        return Err(LoadError::Precompiled);
    }
    let Some(rest) = bytes.strip_prefix(b"\0asm") else {
        let text = bytes.trim_ascii_start();
        if text.starts_with(b"(module") || text.starts_with(b"(component") {
            return Err(LoadError::Text);
        }
        if b"\0asm".starts_with(bytes) {
            return Err(LoadError::Truncated { size: bytes.len() });
        }
        return Err(LoadError::NotWasm(format!(
            "\"{}\"",
            bytes[..bytes.len().min(16)].escape_ascii()
        )));
    };
    match rest.first_chunk::<4>() {
        Some([1, 0, 0, 0]) => Ok(Form::CoreModule),
        Some([0x0d, 0, 1, 0]) => Ok(Form::Component),
        Some(other) => Err(LoadError::Encoding(u32::from_le_bytes(*other))),
        None => Err(LoadError::Truncated { size: bytes.len() }),
    }
}

fn validate(bytes: &[u8]) -> Result<(), LoadError> {
    let off = WasmFeatures::THREADS
        | WasmFeatures::SHARED_EVERYTHING_THREADS
        | WasmFeatures::MEMORY64
        | WasmFeatures::RELAXED_SIMD
        | WasmFeatures::GC
        | WasmFeatures::EXCEPTIONS
        | WasmFeatures::LEGACY_EXCEPTIONS
        | WasmFeatures::STACK_SWITCHING
        | WasmFeatures::CM_ASYNC;
    let features = WasmFeatures::default() - off;
    let outcome = Validator::new_with_features(features).validate_all(bytes);
    outcome.map(drop).map_err(|error| {
        let size = bytes.len();
        if error.message().contains("unexpected end") {
            return LoadError::Truncated { size };
        }
        LoadError::Invalid {
            message: bounded_line(error.message()),
            offset: error.offset(),
            size,
        }
    })
}

/// Makes a component of a core module that carries its WIT.
fn componentize(bytes: &[u8], surface: &mut Surface) -> Result<Vec<u8>, LoadError> {
    let mut wit = Vec::new();
    for payload in Parser::new(0).parse_all(bytes).filter_map(Result::ok) {
        match payload {
            Payload::ImportSection(section) => {
                let modules = section
                    .into_imports()
                    .filter_map(Result::ok)
                    .map(|import| import.module.to_owned());
                surface.imports.extend(modules);
            }
            Payload::CustomSection(section) if section.name().starts_with("component-type") => {
                wit.push(section.data());
            }
            _ => {}
        }
    }
    let imports = surface.imports.iter().map(String::as_str);
    let foreign: Vec<&str> = imports.filter(|name| is_foreign(name)).collect();
    if !foreign.is_empty() {
        return Err(unknown_imports(&foreign));
    }
    if wit.is_empty() {
        return Err(LoadError::NoContract);
    }
    // `wit-parser` panics on some damaged WIT: that is the file's fault, and not the host's.
    let encoded = catch_unwind(|| encode(bytes, &wit));
    encoded
        .unwrap_or_else(|_| Err("its WIT is damaged: the parser panicked".to_owned()))
        .map_err(LoadError::Encode)
}

fn encode(bytes: &[u8], wit: &[&[u8]]) -> Result<Vec<u8>, String> {
    let mut packages = WitPackages::default();
    wit.iter().try_for_each(|section| packages.add(section))?;
    packages.check()?;
    ComponentEncoder::default()
        .validate(true)
        .module(bytes)
        .and_then(|mut encoder| encoder.encode())
        .map_err(|error: anyhow::Error| bounded_line(&format!("{error:#}")))
}

fn is_foreign(import: &str) -> bool {
    let own = import.strip_prefix("[export]").unwrap_or(import);
    !(own.contains(':')
        || own.starts_with("cm32p2")
        || own.starts_with('$')
        || own.starts_with("[resource"))
}

/// A library's or a process' message about a file, as one short line.
pub(crate) fn bounded_line(text: &str) -> String {
    one_line(text, LINE_BYTES_MAX)
}

/// Reads the component's own imports and exports. Returns whether it contains components with code; those without code are made by
/// wit-component around exported interfaces.
fn read_names(component: &[u8]) -> (Surface, bool) {
    let (mut surface, mut is_composed, mut open) = (Surface::default(), false, Vec::new());
    for payload in Parser::new(0).parse_all(component).filter_map(Result::ok) {
        match payload {
            Payload::Version { encoding, .. } => {
                let components = open
                    .iter()
                    .filter(|outer| **outer == Encoding::Component)
                    .count();
                is_composed |= encoding == Encoding::Module && components > 1;
                open.push(encoding);
            }
            Payload::End(_) => drop(open.pop()),
            Payload::ComponentImportSection(section) if open.len() == 1 => {
                let names = section.into_iter().filter_map(Result::ok);
                surface
                    .imports
                    .extend(names.map(|import| import.name.name.to_owned()));
            }
            Payload::ComponentExportSection(section) if open.len() == 1 => {
                let names = section.into_iter().filter_map(Result::ok);
                surface
                    .exports
                    .extend(names.map(|export| export.name.name.to_owned()));
            }
            _ => {}
        }
    }
    (surface, is_composed)
}

/// An interface of the contract, and whether its version is one of ours.
fn our_interface(name: &str) -> Option<(&str, bool)> {
    let (interface, version) = name
        .strip_prefix(CONTRACT)?
        .strip_prefix('/')?
        .split_once('@')?;
    let ours = semver::Version::parse(version)
        .is_ok_and(|v| v.major == 0 && v.minor == 2 && v.pre.is_empty());
    Some((interface, ours))
}

fn check_contract(surface: &Surface) -> Result<(), LoadError> {
    if let Some(other) = surface
        .exports
        .iter()
        .chain(&surface.imports)
        .find(|name| our_interface(name).is_some_and(|(_, ours)| !ours))
    {
        let version = other.split_once('@').map_or("", |(_, version)| version);
        return Err(LoadError::ContractVersion {
            found: bounded_line(&format!("{CONTRACT}@{version}")),
        });
    }
    let unknown: Vec<&str> = surface
        .imports
        .iter()
        .filter(|name| !is_linked(name))
        .map(String::as_str)
        .collect();
    if !unknown.is_empty() {
        return Err(unknown_imports(&unknown));
    }
    let missing: Vec<&str> = REQUIRED
        .iter()
        .copied()
        .filter(|name| !surface.has_export(name))
        .collect();
    if !missing.is_empty() {
        return Err(LoadError::MissingExports {
            missing: missing.join(", "),
        });
    }
    Ok(())
}

fn is_linked(name: &str) -> bool {
    if let Some((interface, ours)) = our_interface(name) {
        return ours && CAPABILITIES.contains(&interface);
    }
    let Some((interface, version)) = name
        .strip_prefix("wasi:")
        .and_then(|rest| rest.split_once('@'))
    else {
        return false;
    };
    version.starts_with("0.2.") && wasi::LINKED.contains(&interface)
}

fn unknown_imports(names: &[&str]) -> LoadError {
    type Test = fn(&&str) -> bool;
    let hints: [(Test, &str); 7] = [
        (
            |name| name.starts_with("wasi:") && name.contains("@0.3"),
            ": it was built for WASI 0.3, and this host supports 0.2",
        ),
        (
            |name| name.starts_with("wasi:sockets") || name.starts_with("wasi:http"),
            ": a driver has no network; componentize-py leaves it out with --stub-wasi",
        ),
        (
            |name| name.starts_with("wasi:"),
            ": of WASI 0.2 a driver has io, cli, clocks and random",
        ),
        (
            |name| name.starts_with("wasi_snapshot"),
            ": it was built for wasm32-wasip1; build it for wasm32-unknown-unknown or wasm32-wasip2",
        ),
        (
            |name| name.starts_with("__wbindgen") || *name == "wbg",
            ": a dependency takes the target for a browser (wasm-bindgen); turn that feature of it off (getrandom, uuid, chrono)",
        ),
        (
            |name| *name == "env",
            ": functions of C that are not defined",
        ),
        (
            |name| name.starts_with(CONTRACT),
            ": it was built against a newer version of the contract",
        ),
    ];
    let hint = hints
        .iter()
        .find(|(test, _)| names.iter().any(test))
        .map_or("", |(_, hint)| *hint);
    let mut shown = names[..names.len().min(NAMES_SHOWN)].join(", ");
    if names.len() > NAMES_SHOWN {
        shown.push_str(", …");
    }
    LoadError::UnknownImports {
        names: bounded_line(&shown),
        hint: hint.into(),
    }
}
