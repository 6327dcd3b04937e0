//! Recordings of drivers' calls: what the host passed to a driver, what the driver asked the host, and what it answered.
//!
//! `Recordings` owns one ring of files for each recorded driver, and the thread that writes them: a call hands over a line and never waits
//! for a disk. `file` is the format of a recording that leaves the node; `redact` leaves values out of one. Never decides what a call
//! does: a driver that is recorded behaves as one that is not.

pub mod file;
pub mod redact;
mod ring;
mod store;

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;

pub use ring::Segment;
pub use store::{Recorded, Recorder, Recordings, RecordingsError, TemporaryRecording};

/// Bytes of the largest ring that a config may set.
pub const RING_BYTES_MAX: u64 = 64 << 20;

/// JSON text that is written as it is.
pub type Raw = Box<RawValue>;

/// The kind of a recorded driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    Wasm,
    Native,
}

/// Revision of the driver that ran: the same for many calls.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Revision {
    pub kind: Kind,
    /// Name of the driver, or of the extended resource of a device plugin.
    pub driver: String,
    /// Semantic version. This field and all that follow belong to a WASM driver.
    pub version: String,
    /// `sha256:` and hex of its file.
    pub digest: String,
    /// Version of the contract that it was built against, such as `nodedock:driver@0.2.0`.
    pub contract: String,
    /// The grant, as a grant file.
    pub grant: String,
    /// The config as JSON, if there is one.
    pub config: Option<String>,
}

impl Revision {
    /// Returns the revision of a native plugin.
    pub fn native(driver: &str) -> Self {
        let none = String::new;
        Self {
            kind: Kind::Native,
            driver: driver.to_owned(),
            version: none(),
            digest: none(),
            contract: none(),
            grant: none(),
            config: None,
        }
    }
}

/// A call of a driver.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RecordedCall<V = Value> {
    /// `discover`, `prepare` and so on; of a native plugin the method.
    pub operation: Cow<'static, str>,
    /// Identifies the operation in logs.
    pub request: String,
    /// Start of the call: milliseconds since the Unix epoch.
    pub at_ms: u64,
    pub arguments: V,
    /// Functions of the host that it called, in order.
    pub host: Vec<HostCall<V>>,
    pub answer: CallOutcome<V>,
    /// A redaction left values out: the call can be printed, and not replayed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_values_left_out: bool,
}

/// A call of a host function by a driver.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct HostCall<V = Value> {
    /// Interface and function, such as `sysfs.read`.
    pub function: Cow<'static, str>,
    pub arguments: V,
    pub answer: CallOutcome<V>,
}

/// Result that a call returned, or why it returned nothing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum CallOutcome<V = Value> {
    Returned(V),
    Failed(Failure),
}

/// Why a call returned nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Failure {
    /// The problem's code, or a gRPC status code.
    pub code: String,
    pub message: String,
    /// Time or load ended the call, and not what the driver did: another run may end otherwise.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub by_time: bool,
}

/// A line of a recording after its first one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Line<V = Value> {
    /// Revision that runs in the calls that follow.
    Revision(Revision),
    Call(RecordedCall<V>),
    /// So many calls are missing here: they were too large, came too fast, or could not be written.
    Lost(u64),
    /// A driver's file.
    File(DriverFile),
    /// The last line.
    End(End),
}

/// A driver's file in a recording.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DriverFile {
    /// `sha256:` and hex.
    pub digest: String,
    pub base64: String,
}

/// Last line, by which a reader knows that a recording is complete.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct End {
    /// Lines between the first and this one.
    pub lines: u64,
}

/// Returns a value as JSON text. Everything recorded is made of texts, numbers and lists, which JSON can always express.
pub fn raw(value: &impl Serialize) -> Raw {
    serde_json::value::to_raw_value(value).unwrap_or_else(|_| RawValue::NULL.to_owned())
}
