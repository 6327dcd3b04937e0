//! The calls of a driver, with the functions that they call; of those that can be recorded, their arguments and their answers as the driver
//! gave them.

use std::sync::Arc;

use serde::{Deserialize, Serialize, Serializer};

use crate::bindings::exports::nodedock::driver::scheduling::Additions;
use crate::bindings::types::{
    Claim, ClaimRecord, Context, DeviceHealth, DeviceReadings, Inventory, LeftOutDevice,
    PrepareOutcome, Problem, UnprepareOutcome,
};
use crate::calls::sandbox::GuestCall;
use crate::host_functions::tap::Tap;
use crate::stats::{Limit, Operation};
use crate::{CallFailure, Trigger};
use nodedock_base::clock::now_ms;
use nodedock_core::driver::Call;
use nodedock_core::recording::{CallOutcome, Failure, Raw, RecordedCall, Recorder, Revision, raw};

/// An inventory, with what the driver adds for the scheduler and what it leaves out.
#[derive(Debug)]
pub(crate) struct Discovery {
    pub(crate) inventory: Inventory,
    /// None: the driver does not export the facet.
    pub(crate) additions: Option<Additions>,
    pub(crate) left_out: Option<Vec<LeftOutDevice>>,
}

/// Recordings have a list: the inventory, the additions or null, and the devices that are left out if the driver exports the facet.
impl Serialize for Discovery {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self {
            inventory,
            additions,
            left_out,
        } = self;
        match left_out {
            Some(left_out) => (inventory, additions, left_out).serialize(serializer),
            None => (inventory, additions).serialize(serializer),
        }
    }
}

pub(crate) type Discovered = Result<Discovery, Problem>;

/// A call with its arguments.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub(crate) enum GuestRequest {
    Discover {
        context: Context,
        trigger: Trigger,
    },
    Health {
        context: Context,
    },
    Telemetry {
        context: Context,
    },
    Prepare {
        context: Context,
        claims: Vec<Claim>,
    },
    Unprepare {
        context: Context,
        claims: Vec<ClaimRecord>,
    },
}

impl GuestRequest {
    pub(crate) fn operation(&self) -> Operation {
        match self {
            Self::Discover { .. } => Operation::Discover,
            Self::Health { .. } => Operation::Health,
            Self::Telemetry { .. } => Operation::Telemetry,
            Self::Prepare { .. } => Operation::Prepare,
            Self::Unprepare { .. } => Operation::Unprepare,
        }
    }

    /// The context. A recording has its config once, in the revision, and not in each call.
    pub(crate) fn context_mut(&mut self) -> &mut Context {
        match self {
            Self::Discover { context, .. }
            | Self::Health { context }
            | Self::Telemetry { context }
            | Self::Prepare { context, .. }
            | Self::Unprepare { context, .. } => context,
        }
    }
}

pub(crate) fn discover(context: Context, trigger: Trigger) -> impl GuestCall<Discovered> {
    guest(move |store, instance, exports| {
        Box::pin(async move {
            let discovery = exports.discovery.load(&mut *store, instance)?;
            let inventory = match discovery
                .call_discover(&mut *store, &context, &trigger)
                .await?
            {
                Ok(inventory) => inventory,
                Err(problem) => return Ok(Err(problem)),
            };
            let additions = match &exports.scheduling {
                Some(scheduling) => {
                    let scheduling = scheduling.load(&mut *store, instance)?;
                    let additions = scheduling.call_schedule(&mut *store, &context, &inventory);
                    Some(additions.await?)
                }
                None => None,
            };
            let additions = match additions.transpose() {
                Ok(additions) => additions,
                Err(problem) => return Ok(Err(problem)),
            };
            let left_out = match &exports.left_out {
                Some(left_out) => {
                    let left_out = left_out.load(&mut *store, instance)?;
                    Some(left_out.call_list_devices(store, &context).await?)
                }
                None => None,
            };
            Ok(left_out.transpose().map(|left_out| Discovery {
                inventory,
                additions,
                left_out,
            }))
        })
    })
}

pub(crate) fn health(context: Context) -> impl GuestCall<Result<Vec<DeviceHealth>, Problem>> {
    guest(move |store, instance, exports| {
        Box::pin(async move {
            let Some(health) = &exports.health else {
                return Ok(Ok(Vec::new()));
            };
            health
                .load(&mut *store, instance)?
                .call_check(store, &context)
                .await
        })
    })
}

pub(crate) fn telemetry(context: Context) -> impl GuestCall<Result<Vec<DeviceReadings>, Problem>> {
    guest(move |store, instance, exports| {
        Box::pin(async move {
            let Some(telemetry) = &exports.telemetry else {
                return Ok(Ok(Vec::new()));
            };
            telemetry
                .load(&mut *store, instance)?
                .call_read(store, &context)
                .await
        })
    })
}

pub(crate) fn prepare(context: Context, claims: Vec<Claim>) -> impl GuestCall<Vec<PrepareOutcome>> {
    guest(move |store, instance, exports| {
        Box::pin(async move {
            let preparation = exports.preparation.load(&mut *store, instance)?;
            preparation.call_prepare(store, &context, &claims).await
        })
    })
}

pub(crate) fn unprepare(
    context: Context,
    claims: Vec<ClaimRecord>,
) -> impl GuestCall<Vec<UnprepareOutcome>> {
    guest(move |store, instance, exports| {
        Box::pin(async move {
            let preparation = exports.preparation.load(&mut *store, instance)?;
            preparation.call_unprepare(store, &context, &claims).await
        })
    })
}

/// The texts of the schemas of the config and of the parameters.
pub(crate) fn schemas() -> impl GuestCall<(Option<String>, Option<String>)> {
    guest(move |store, instance, exports| {
        Box::pin(async move {
            let Some(configuration) = &exports.configuration else {
                return Ok((None, None));
            };
            let configuration = configuration.load(&mut *store, instance)?;
            let config = configuration.call_config_schema(&mut *store).await?;
            Ok((config, configuration.call_parameters_schema(store).await?))
        })
    })
}

pub(crate) fn validate_config(config: String) -> impl GuestCall<Result<(), Problem>> {
    guest(move |store, instance, exports| {
        Box::pin(async move {
            let Some(configuration) = &exports.configuration else {
                return Ok(Ok(()));
            };
            let configuration = configuration.load(&mut *store, instance)?;
            configuration.call_validate_config(store, &config).await
        })
    })
}

pub(crate) fn validate_parameters(parameters: String) -> impl GuestCall<Result<(), Problem>> {
    guest(move |store, instance, exports| {
        Box::pin(async move {
            let Some(configuration) = &exports.configuration else {
                return Ok(Ok(()));
            };
            let configuration = configuration.load(&mut *store, instance)?;
            configuration
                .call_validate_parameters(store, &parameters)
                .await
        })
    })
}

/// Tells the compiler the type of a closure.
fn guest<R>(call: impl GuestCall<R>) -> impl GuestCall<R> {
    call
}

/// A call that is being recorded.
pub(crate) struct CallRecording {
    recorder: Recorder,
    revision: Arc<Revision>,
    operation: Operation,
    request: Arc<str>,
    at_ms: u64,
    arguments: Raw,
    tap: Tap,
}

impl CallRecording {
    pub(crate) fn begin(
        recorder: &Recorder,
        revision: &Arc<Revision>,
        call: &Call,
        mut request: GuestRequest,
    ) -> Self {
        request.context_mut().config.clear();
        Self {
            recorder: recorder.clone(),
            revision: Arc::clone(revision),
            operation: request.operation(),
            request: Arc::clone(&call.request_id),
            at_ms: now_ms(),
            arguments: raw(&request),
            tap: Tap::recording(recorder.line_bytes_max()),
        }
    }

    pub(crate) fn tap(&self) -> Tap {
        self.tap.clone()
    }

    /// Records the call, unless it did not begin.
    pub(crate) fn end<R: Serialize>(self, answer: &Result<R, CallFailure>) {
        let answer = match answer {
            Ok(answer) => CallOutcome::Returned(raw(answer)),
            Err(CallFailure::Quarantined(_) | CallFailure::Busy { .. }) => return,
            Err(failure) => CallOutcome::Failed(to_failure(failure)),
        };
        let Some(host) = self.tap.take() else {
            return self.recorder.lose();
        };
        let (operation, request) = (self.operation.as_str().into(), self.request.to_string());
        let (at_ms, arguments) = (self.at_ms, self.arguments);
        let call = RecordedCall {
            operation,
            request,
            at_ms,
            arguments,
            host,
            answer,
            has_values_left_out: false,
        };
        self.recorder.record(&self.revision, call);
    }
}

pub(crate) fn to_failure(failure: &CallFailure) -> Failure {
    let by_time = match failure {
        CallFailure::Timeout(_) | CallFailure::Busy { .. } | CallFailure::Quarantined(_) => true,
        CallFailure::Limit(reached) => matches!(reached.limit, Limit::Cpu | Limit::Wall),
        CallFailure::Exited(_) | CallFailure::Trapped(_) => false,
    };
    Failure {
        code: failure.code().to_string(),
        message: failure.to_string(),
        by_time,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{json, to_value};

    /// A recording of a driver without the facet is replayed by hosts from before it, and the other way round.
    #[test]
    fn facet_alone_changes_the_recording() {
        let discovery = |left_out| Discovery {
            inventory: Inventory { pools: Vec::new() },
            additions: None,
            left_out,
        };
        let without = to_value(discovery(None)).unwrap();
        assert_eq!(without, json!([{"pools": []}, null]));
        let device = LeftOutDevice {
            name: "ttyS0".to_owned(),
            reason: "it is a console".to_owned(),
        };
        let with = to_value(discovery(Some(vec![device]))).unwrap();
        let device = json!({"name": "ttyS0", "reason": "it is a console"});
        assert_eq!(with, json!([{"pools": []}, null, [device]]));
    }
}
