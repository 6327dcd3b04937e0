//! Records the messages that are exchanged with one native plugin.

use std::sync::Arc;

use nodedock_proto::prost::Message;
use serde::Serialize;
use tokio::time::error::Elapsed;
use tonic::Status;

use super::clean;
use nodedock_base::clock::now_ms;
use nodedock_core::recording::{
    CallOutcome, Failure, Raw, RecordedCall, Recorder, Recordings, Revision, raw,
};

/// The recorder of a plugin. The default records nothing.
#[derive(Debug, Clone, Default)]
pub struct Tap {
    recorder: Recorder,
    revision: Option<Arc<Revision>>,
}

impl Tap {
    /// Creates the tap of a DRA driver, or of a device plugin by its extended resource.
    pub fn new(recordings: &Recordings, name: &str) -> Self {
        Self {
            recorder: recordings.recorder(name),
            revision: Some(Arc::new(Revision::native(name))),
        }
    }

    /// Begins to record a call, if the plugin is recorded.
    pub(super) fn begin<Q>(&self, request_id: &str, method: &str, message: &Q) -> Option<Exchange>
    where
        Q: Message + Serialize,
    {
        let revision = self.revision.as_ref().filter(|_| self.recorder.is_on())?;
        // The texts of one line: a larger message would be lost after it was made.
        if message.encoded_len() > self.recorder.line_bytes_max() {
            self.recorder.lose();
            return None;
        }
        Some(Exchange {
            recorder: self.recorder.clone(),
            revision: Arc::clone(revision),
            method: method.to_owned(),
            request: request_id.to_owned(),
            at_ms: now_ms(),
            arguments: raw(message),
        })
    }

    /// Records a message of a stream, as the answer to nothing.
    pub(super) fn received<A: Message + Serialize>(
        &self,
        request_id: &str,
        method: &str,
        message: &A,
    ) {
        if let Some(exchange) = self.begin(request_id, method, &()) {
            exchange.returned(message);
        }
    }
}

/// A call that is being recorded.
pub(super) struct Exchange {
    recorder: Recorder,
    revision: Arc<Revision>,
    method: String,
    request: String,
    at_ms: u64,
    arguments: Raw,
}

impl Exchange {
    pub(super) fn ended<A: Message + Serialize>(self, ended: &Result<Result<A, Status>, Elapsed>) {
        let failure = match ended {
            Ok(Ok(answer)) => return self.returned(answer),
            Ok(Err(status)) => Failure {
                code: format!("{:?}", status.code()),
                message: clean(status.message()),
                by_time: false,
            },
            Err(_) => Failure {
                code: "DeadlineExceeded".to_owned(),
                message: "no answer before the deadline".to_owned(),
                by_time: true,
            },
        };
        self.record(CallOutcome::Failed(failure));
    }

    fn returned<A: Message + Serialize>(self, answer: &A) {
        if answer.encoded_len() > self.recorder.line_bytes_max() {
            return self.recorder.lose();
        }
        self.record(CallOutcome::Returned(raw(answer)));
    }

    fn record(self, answer: CallOutcome<Raw>) {
        let Self {
            recorder,
            revision,
            method,
            request,
            at_ms,
            arguments,
        } = self;
        let call = RecordedCall {
            operation: method.into(),
            request,
            at_ms,
            arguments,
            host: Vec::new(),
            answer,
            has_values_left_out: false,
        };
        recorder.record(&revision, call);
    }
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::Value;

    use super::*;
    use nodedock_core::recording::Line;

    /// Records a plugin in a directory of a test.
    pub(in crate::grpc) struct Recorded {
        recordings: Recordings,
        name: String,
        _directory: tempfile::TempDir,
    }

    impl Recorded {
        pub(in crate::grpc) fn new(name: &str) -> Self {
            let directory = tempfile::tempdir().unwrap();
            let recordings =
                Recordings::start(directory.path(), [name.to_owned()], 1 << 20).unwrap();
            Self {
                recordings,
                name: name.to_owned(),
                _directory: directory,
            }
        }

        pub(in crate::grpc) fn tap(&self) -> Tap {
            Tap::new(&self.recordings, &self.name)
        }

        /// The calls: method, arguments and answer.
        pub(in crate::grpc) async fn calls(&self) -> Vec<(String, Value, CallOutcome)> {
            let mut calls = Vec::new();
            for segment in self.recordings.read(&self.name).await.unwrap().segments {
                let text = segment.read().unwrap();
                for line in text
                    .split(|byte| *byte == b'\n')
                    .filter(|line| !line.is_empty())
                {
                    if let Line::Call(call) = serde_json::from_slice(line).unwrap() {
                        calls.push((call.operation.into_owned(), call.arguments, call.answer));
                    }
                }
            }
            calls
        }
    }
}
