//! Converts between the contract's types and the model. Everything from a driver is checked once, by `nodedock_model::answer`: names, bounds,
//! duplicates. An answer beyond a bound is refused as a whole, and the refusal says where it is.

mod identity;
mod inventory;
mod prepared;
mod scheduling;

use crate::Limit;
use crate::bindings::types;
use nodedock_base::printable::{one_line, shorten};
use nodedock_model::answer::Labels;
use nodedock_model::check::{Field, Findings, Reason, Violation};
use nodedock_model::limit::{
    LABEL_KEY_BYTES_MAX, LABEL_VALUE_BYTES_MAX, LABELS_MAX, PROBLEM_CODE_BYTES_MAX,
    PROBLEM_MESSAGE_BYTES_MAX,
};
use nodedock_model::rule::is_problem_code;
use nodedock_model::{
    ConfigSource, DriverClaim, DriverClaimRecord, NodeKind, Problem, ProblemCode, ProblemKind,
};

pub(super) use identity::driver_info;
pub(super) use inventory::{health_report, inventory, left_out, readings_report};
pub(super) use prepared::prepared_claim;
pub(super) use scheduling::add_scheduling;

/// Why an answer is refused, and where the error is: the first violation of it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct Refusal {
    text: String,
    /// The limit that it exceeds. None: the error is another one.
    limit: Option<Limit>,
}

impl Refusal {
    pub(super) fn new(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            limit: None,
        }
    }

    /// The limit that the answer exceeds, if that is the error.
    pub(super) fn limit(&self) -> Option<Limit> {
        self.limit
    }

    pub(super) fn into_problem(self) -> Problem {
        let message = shorten(
            &format!("the driver's answer is refused: {}", self.text),
            PROBLEM_MESSAGE_BYTES_MAX,
        );
        Problem::internal(ProblemCode::DriverAnswerNotValid, message)
    }
}

impl From<Findings> for Refusal {
    fn from(found: Findings) -> Self {
        let first = found.first();
        Self {
            text: first.map(Violation::to_string).unwrap_or_default(),
            limit: first.and_then(limit),
        }
    }
}

fn limit(violation: &Violation) -> Option<Limit> {
    match violation.reason {
        Reason::TooMany { .. } => Some(Limit::AnswerEntries),
        Reason::TooLong { .. } if violation.field() == Some(Field::Memo) => Some(Limit::Memo),
        Reason::TooLong { .. } => Some(Limit::AnswerBytes),
        _ => None,
    }
}

type Checked<T> = Result<T, Refusal>;

fn labels(pairs: Vec<types::KeyValue>) -> Labels {
    let pair = |types::KeyValue { key, value }: types::KeyValue| (key, value);
    pairs.into_iter().map(pair).collect()
}

/// Returns true if a problem is beyond its bounds.
pub(super) fn is_cut(problem: &types::Problem) -> bool {
    let long = |types::KeyValue { key, value }: &types::KeyValue| {
        key.len() > LABEL_KEY_BYTES_MAX || value.len() > LABEL_VALUE_BYTES_MAX
    };
    problem.code.len() > PROBLEM_CODE_BYTES_MAX
        || problem.message.len() > PROBLEM_MESSAGE_BYTES_MAX
        || problem.details.len() > LABELS_MAX
        || problem.details.iter().any(long)
}

/// A problem that a driver reports. Texts beyond the bounds are shortened rather than refused.
pub(super) fn problem_to_model(problem: types::Problem) -> Problem {
    let types::Problem {
        kind,
        code,
        message,
        retry_after_ms,
        details,
    } = problem;
    let kind = match kind {
        types::ProblemKind::Invalid => ProblemKind::Invalid,
        types::ProblemKind::Denied => ProblemKind::Denied,
        types::ProblemKind::NotFound => ProblemKind::NotFound,
        types::ProblemKind::Conflict => ProblemKind::Conflict,
        types::ProblemKind::Unavailable => ProblemKind::Unavailable,
        types::ProblemKind::Internal => ProblemKind::Internal,
    };
    // Callers wait for the end of a quarantine: only the host may report one.
    let is_code = code != ProblemCode::DriverQuarantined && is_problem_code(&code);
    let remark = match is_code {
        true => String::new(),
        false => refused_code(&one_line(&code, PROBLEM_CODE_BYTES_MAX)),
    };
    let mut message = one_line(&message, PROBLEM_MESSAGE_BYTES_MAX - remark.len());
    if message.is_empty() {
        message = "the driver gave no reason".to_owned();
    }
    message.push_str(&remark);
    Problem {
        kind,
        code: if is_code {
            code
        } else {
            ProblemCode::NoCode.into()
        },
        message,
        retry_after_ms,
        details: (details.iter().take(LABELS_MAX))
            .map(|types::KeyValue { key, value }| {
                (
                    one_line(key, LABEL_KEY_BYTES_MAX),
                    one_line(value, LABEL_VALUE_BYTES_MAX),
                )
            })
            .collect(),
    }
}

/// Says why the code of a problem is not shown.
fn refused_code(code: &str) -> String {
    let why = if code == ProblemCode::DriverQuarantined.as_str() {
        "the host's own".to_owned()
    } else {
        format!(
            "not valid: it has lower-case letters, digits and dashes, and at most {PROBLEM_CODE_BYTES_MAX} bytes"
        )
    };
    format!(" (the driver's problem code {code:?} is {why})")
}

pub(super) fn key_values(
    pairs: impl IntoIterator<Item = (String, String)>,
) -> Vec<types::KeyValue> {
    pairs
        .into_iter()
        .map(|(key, value)| types::KeyValue { key, value })
        .collect()
}

pub(super) fn problem_to_guest(problem: &Problem) -> types::Problem {
    types::Problem {
        kind: match problem.kind {
            ProblemKind::Invalid => types::ProblemKind::Invalid,
            ProblemKind::Denied => types::ProblemKind::Denied,
            ProblemKind::NotFound => types::ProblemKind::NotFound,
            ProblemKind::Conflict => types::ProblemKind::Conflict,
            ProblemKind::Unavailable => types::ProblemKind::Unavailable,
            ProblemKind::Internal => types::ProblemKind::Internal,
        },
        code: problem.code.clone(),
        message: problem.message.clone(),
        retry_after_ms: problem.retry_after_ms,
        details: key_values(problem.details.clone()),
    }
}

pub(super) fn claim_to_guest(claim: &DriverClaim) -> types::Claim {
    let device = |device: &nodedock_model::AllocatedDevice| types::AllocatedDevice {
        request: device.request.clone(),
        pool: device.pool.to_string(),
        device: device.device.to_string(),
        share_id: device.share_id.clone(),
        consumed: (device.consumed.iter())
            .map(|(name, value)| types::Counter {
                name: name.clone(),
                value: value.clone(),
            })
            .collect(),
        admin_access: device.admin_access,
    };
    let parameters = |config: &nodedock_model::OpaqueConfig| types::OpaqueParameters {
        source: match config.source {
            ConfigSource::DeviceClass => types::ParametersSource::DeviceClass,
            ConfigSource::Claim => types::ParametersSource::Claim,
        },
        requests: config.requests.clone(),
        parameters: config.parameters.clone(),
    };
    let consumer = |consumer: &nodedock_model::Consumer| types::Consumer {
        api_group: consumer.api_group.clone(),
        resource: consumer.resource.clone(),
        namespace: claim.id.namespace.to_string(),
        name: consumer.name.to_string(),
        uid: consumer.uid.to_string(),
    };
    types::Claim {
        id: types::ClaimRef {
            namespace: claim.id.namespace.to_string(),
            name: claim.id.name.to_string(),
            uid: claim.id.uid.to_string(),
        },
        devices: claim.devices.iter().map(device).collect(),
        parameters: claim.configs.iter().map(parameters).collect(),
        reserved_for: claim.reserved_for.iter().map(consumer).collect(),
        annotations: key_values(claim.annotations.clone()),
        progress: claim.progress.clone(),
    }
}

pub(super) fn claim_record_to_guest(record: &DriverClaimRecord) -> types::ClaimRecord {
    types::ClaimRecord {
        claim: claim_to_guest(&record.claim),
        prepared: record.prepared,
        memo: record.memo.clone(),
        driver_version: record.driver_version.clone(),
        boot_id: record.boot_id.clone(),
    }
}

pub(super) fn node_kind(kind: types::NodeKind) -> NodeKind {
    match kind {
        types::NodeKind::Character => NodeKind::Character,
        types::NodeKind::Block => NodeKind::Block,
        types::NodeKind::Fifo => NodeKind::Fifo,
    }
}

#[cfg(test)]
mod tests;
