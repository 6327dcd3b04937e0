//! Replays the recorded calls of a WASM driver without its node: the host's functions answer from the recording, and everything that the
//! driver does is compared with what it did then.
//!
//! Each call runs in a fresh instance, as on the node, so that calls are independent. Time limits are the highest that a grant can set: the
//! machine may be slower. A call that time ended on the node is not compared.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::Serialize;
use serde_json::Value;

use crate::calls::guest_calls::{self, GuestRequest, to_failure};
use crate::calls::sandbox::{GuestCall, Sandbox};
use crate::host_functions::state::Scope;
use crate::host_functions::tap::{ReplayEnd, Tap, shown_text};
use crate::load::admission::{CONTRACT, CONTRACT_VERSION};
use crate::stats::Operation;
use crate::{CallFailure, DriverFile, LoadError, WasmDriver, WasmHost};
use nodedock_core::driver::Call;
use nodedock_core::recording::file::{ReadError, Reader};
use nodedock_core::recording::{CallOutcome, Kind, Line, Raw, RecordedCall, Revision, raw};
use nodedock_model::SideFileError;
use nodedock_model::grant::Grant;
use nodedock_model::limit;

/// Drivers that are loaded at the same time: a ring has as many revisions, unless its segments are short.
const DRIVERS_MAX: usize = 8;

/// The result of a replay: everything up to the first difference.
#[derive(Debug, Clone, PartialEq)]
pub struct Replayed {
    /// Calls that were replayed, the one with the difference included.
    pub calls: usize,
    /// Calls that time or load ended when they were recorded: they are not compared.
    pub skipped: usize,
    /// Calls of which a redaction left values out: they are not compared.
    pub redacted: usize,
    /// Calls that are missing in the recording.
    pub lost: u64,
    pub difference: Option<Difference>,
}

/// The first place where the driver did something else than it did when it was recorded.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    /// Number of the call in the recording, from 1.
    pub call: usize,
    pub operation: String,
    pub request: String,
    /// Number of the host call in it, from 1; none: the answer.
    pub host_call: Option<usize>,
    /// Place in the answer: a JSON pointer; empty: all of it.
    pub place: String,
    pub expected: String,
    pub got: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            call,
            operation,
            request,
            host_call,
            place,
            expected,
            got,
        } = self;
        write!(f, "call {call} ({operation}, request {request}), ")?;
        match host_call {
            Some(number) => write!(f, "host call {number}")?,
            None if place.is_empty() => write!(f, "answer")?,
            None => write!(f, "answer at {place}")?,
        }
        write!(f, ":\n  expected {expected}\n  got      {got}")
    }
}

/// Why a recording cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error(
        "it is of the native plugin {0}, which cannot be replayed without its process: --print shows it"
    )]
    Native(String),
    #[error(
        "it is of a driver for {0}, and this version replays {CONTRACT}@{track}",
        track = contract_track(CONTRACT_VERSION)
    )]
    Contract(String),
    #[error("it does not contain the driver's file {0}: name a file with --driver")]
    NoFile(String),
    #[error("its driver's file {0} is damaged")]
    File(String),
    #[error("load {label}")]
    Load {
        label: String,
        source: Box<LoadError>,
    },
    #[error("the file is driver {found}, and the recording is of {recorded}")]
    OtherDriver { found: String, recorded: String },
    #[error("its grant")]
    Grant(#[source] SideFileError),
    #[error("call {call} has no revision before it")]
    NoRevision { call: usize },
    #[error("call {call}: its arguments are not those of a {operation}: {why}")]
    Arguments {
        call: usize,
        operation: String,
        why: String,
    },
}

/// Replays a recording with the driver in it, or with another file of the same driver, until the first difference. Checks first that the
/// recording is whole. Holds one of its lines at a time.
pub async fn replay(
    host: &WasmHost,
    recording: &[u8],
    other: Option<Bytes>,
) -> Result<Replayed, ReplayError> {
    let mut whole = Reader::new(recording)?;
    while whole.next_line()?.is_some() {}
    let mut replayed = Replayed {
        calls: 0,
        skipped: 0,
        redacted: 0,
        lost: 0,
        difference: None,
    };
    // The one that was loaded last is the first.
    let mut drivers: VecDeque<(Arc<Revision>, ReplayedDriver)> = VecDeque::new();
    let (mut revision, mut number) = (None, 0);
    let mut lines = Reader::new(recording)?;
    while let Some(line) = lines.next_line()? {
        match line {
            Line::Revision(next) if next.kind == Kind::Native => {
                return Err(ReplayError::Native(shown_text(&next.driver)));
            }
            Line::Revision(next) => revision = Some(Arc::new(next)),
            Line::Lost(lost) => replayed.lost = replayed.lost.saturating_add(lost),
            Line::File(_) | Line::End(_) => {}
            Line::Call(call) => {
                number += 1;
                let revision = revision
                    .as_ref()
                    .ok_or(ReplayError::NoRevision { call: number })?;
                if call.has_values_left_out {
                    replayed.redacted += 1;
                    continue;
                }
                let index = match drivers.iter().position(|(known, _)| known == revision) {
                    Some(index) => index,
                    None => {
                        drivers.truncate(DRIVERS_MAX - 1);
                        let driver =
                            ReplayedDriver::load(host, recording, revision, other.clone()).await?;
                        drivers.push_front((Arc::clone(revision), driver));
                        0
                    }
                };
                if matches!(&call.answer, CallOutcome::Failed(failure) if failure.by_time) {
                    replayed.skipped += 1;
                    continue;
                }
                replayed.calls += 1;
                replayed.difference = drivers[index].1.replay(number, call).await?;
                if replayed.difference.is_some() {
                    break;
                }
            }
        }
    }
    Ok(replayed)
}

/// Major and minor version, of which a host supports one.
fn contract_track(version: &str) -> String {
    let track: Vec<_> = version.split('.').take(2).collect();
    format!("{}.x", track.join("."))
}

/// A driver as it was when it was recorded.
struct ReplayedDriver {
    sandbox: Sandbox,
    config: String,
    /// It is the recorded file.
    is_same: bool,
}

impl ReplayedDriver {
    async fn load(
        host: &WasmHost,
        recording: &[u8],
        revision: &Revision,
        other: Option<Bytes>,
    ) -> Result<Self, ReplayError> {
        let version = revision
            .contract
            .strip_prefix(CONTRACT)
            .and_then(|rest| rest.strip_prefix('@'));
        if version.map(contract_track) != Some(contract_track(CONTRACT_VERSION)) {
            return Err(ReplayError::Contract(shown_text(&revision.contract)));
        }
        let mut grant = Grant::parse(&revision.grant).map_err(ReplayError::Grant)?;
        // What the driver may do is in the recording.
        grant.allowed = nodedock_model::grant::Capabilities::default();
        let (label, bytes) = match other {
            Some(bytes) => ("the driver's file".to_owned(), bytes),
            None => (
                "the recorded driver".to_owned(),
                recorded_file(recording, &revision.digest)?,
            ),
        };
        let file = DriverFile {
            name: revision.driver.clone(),
            bytes,
        };
        let loaded = host.load(file, grant, revision.config.clone()).await;
        let driver = loaded.map_err(|source| ReplayError::Load {
            label,
            source: Box::new(source),
        })?;
        if driver.info().name.as_str() != revision.driver {
            let found = driver.info().name.to_string();
            return Err(ReplayError::OtherDriver {
                found,
                recorded: shown_text(&revision.driver),
            });
        }
        let (is_same, config) = (
            driver.digest() == revision.digest,
            driver.config_text().to_owned(),
        );
        Ok(Self {
            sandbox: patient(driver),
            config,
            is_same,
        })
    }

    async fn replay(
        &self,
        number: usize,
        call: RecordedCall<Raw>,
    ) -> Result<Option<Difference>, ReplayError> {
        let mut request: GuestRequest =
            serde_json::from_str(call.arguments.get()).map_err(|error| {
                let operation = shown_text(&call.operation);
                ReplayError::Arguments {
                    call: number,
                    operation,
                    why: error.to_string(),
                }
            })?;
        request.context_mut().config.clone_from(&self.config);
        let tap = Tap::replaying(call.host);
        let answer = match self.run(&call.request, request, &tap).await {
            Ok(answer) => CallOutcome::Returned(answer),
            Err(failure) => CallOutcome::Failed(to_failure(&failure)),
        };
        let found = match tap.replay_end() {
            Some(ReplayEnd::AsRecorded) => None,
            Some(ReplayEnd::Differs {
                index,
                expected,
                got,
            }) => {
                let got = got.unwrap_or_else(|| shown_answer(&answer));
                let expected = expected.unwrap_or_else(|| shown_answer(&call.answer));
                Some((Some(index + 1), String::new(), expected, got))
            }
            None => self
                .difference(&call.answer, &answer)
                .map(|(place, expected, got)| (None, place, expected, got)),
        };
        Ok(found.map(|(host_call, place, expected, got)| Difference {
            call: number,
            operation: shown_text(&call.operation),
            request: shown_text(&call.request),
            host_call,
            place,
            expected,
            got,
        }))
    }

    async fn run(&self, id: &str, request: GuestRequest, tap: &Tap) -> Result<Raw, CallFailure> {
        let operation = request.operation();
        let call = Call {
            request_id: id.into(),
            deadline: limit::CALL_WALL_MAX,
        };
        match request {
            GuestRequest::Discover { context, trigger } => {
                self.call(
                    &call,
                    operation,
                    tap,
                    guest_calls::discover(context, trigger),
                )
                .await
            }
            GuestRequest::Health { context } => {
                self.call(&call, operation, tap, guest_calls::health(context))
                    .await
            }
            GuestRequest::Telemetry { context } => {
                self.call(&call, operation, tap, guest_calls::telemetry(context))
                    .await
            }
            GuestRequest::Prepare { context, claims } => {
                self.call(&call, operation, tap, guest_calls::prepare(context, claims))
                    .await
            }
            GuestRequest::Unprepare { context, claims } => {
                self.call(
                    &call,
                    operation,
                    tap,
                    guest_calls::unprepare(context, claims),
                )
                .await
            }
        }
    }

    /// Calls without the quarantine: a recording may have any number of failures.
    async fn call<R: Serialize + Send + 'static>(
        &self,
        call: &Call,
        operation: Operation,
        tap: &Tap,
        guest: impl GuestCall<R>,
    ) -> Result<Raw, CallFailure> {
        let tap = Some(tap.clone());
        let answer = self
            .sandbox
            .call_admitted(Instant::now(), call, operation, None, tap, guest)
            .await?;
        Ok(raw(&answer))
    }

    /// Place, expected and got.
    fn difference(
        &self,
        expected: &CallOutcome<Raw>,
        got: &CallOutcome<Raw>,
    ) -> Option<(String, String, String)> {
        match (expected, got) {
            (CallOutcome::Returned(expected), CallOutcome::Returned(got))
                if expected.get() == got.get() =>
            {
                None
            }
            (CallOutcome::Returned(expected), CallOutcome::Returned(got)) => {
                let [expected, got] = [expected, got]
                    .map(|raw| serde_json::from_str::<Value>(raw.get()).unwrap_or_default());
                let (place, expected, got) = first_difference(String::new(), &expected, &got)?;
                Some((place, shown(expected), shown(got)))
            }
            // Where a trap was depends on the build.
            (CallOutcome::Failed(expected), CallOutcome::Failed(got))
                if expected.code == got.code
                    && (!self.is_same || expected.message == got.message) =>
            {
                None
            }
            (expected, got) => Some((String::new(), shown_answer(expected), shown_answer(got))),
        }
    }
}

/// The same driver with all the time that a grant can give.
fn patient(driver: WasmDriver) -> Sandbox {
    let sandbox = driver.sandbox;
    let mut scope = Scope::clone(&sandbox.scope);
    (scope.limits.wall, scope.limits.cpu) = (limit::CALL_WALL_MAX * 2, limit::CALL_CPU_MAX);
    Sandbox {
        scope: Arc::new(scope),
        ..sandbox
    }
}

/// Passes through the recording to the file: no more than one driver's file is in memory.
fn recorded_file(recording: &[u8], digest: &str) -> Result<Bytes, ReplayError> {
    let mut lines = Reader::new(recording)?;
    let base64 = loop {
        match lines.next_line()? {
            Some(Line::File(file)) if file.digest == digest => break file.base64,
            Some(_) => {}
            None => return Err(ReplayError::NoFile(shown_text(digest))),
        }
    };
    let bytes = STANDARD.decode(base64).unwrap_or_default();
    let file = DriverFile {
        name: String::new(),
        bytes: bytes.into(),
    };
    if file.digest() == digest {
        Ok(file.bytes)
    } else {
        Err(ReplayError::File(shown_text(digest)))
    }
}

/// The innermost place of the first difference, and the values there; null where one side has nothing.
fn first_difference<'a>(
    place: String,
    expected: &'a Value,
    got: &'a Value,
) -> Option<(String, &'a Value, &'a Value)> {
    match (expected, got) {
        (Value::Array(expected), Value::Array(got)) => {
            let length = expected.len().max(got.len());
            (0..length).find_map(|index| {
                let [expected, got] =
                    [expected, got].map(|list| list.get(index).unwrap_or(&Value::Null));
                first_difference(format!("{place}/{index}"), expected, got)
            })
        }
        (Value::Object(expected), Value::Object(got)) if expected.keys().eq(got.keys()) => expected
            .iter()
            .zip(got.values())
            .find_map(|((key, expected), got)| {
                first_difference(format!("{place}/{key}"), expected, got)
            }),
        (expected, got) => (expected != got).then_some((place, expected, got)),
    }
}

fn shown(value: &Value) -> String {
    shown_text(&value.to_string())
}

fn shown_answer(answer: &CallOutcome<Raw>) -> String {
    match answer {
        CallOutcome::Returned(value) => format!("the answer {}", shown_text(value.get())),
        CallOutcome::Failed(failure) => {
            format!(
                "a failure, {}: {}",
                shown_text(&failure.code),
                shown_text(&failure.message)
            )
        }
    }
}
