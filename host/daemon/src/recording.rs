//! Hands out what is recorded of a driver.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use nodedock_proto::node::v1::{RecordDriverRequest, RecordDriverResponse};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use nodedock_base::error::chain;
use nodedock_base::tasks::Tasks;
use nodedock_core::recording::{
    DriverFile, Kind, Line, Raw, Recorded, Recordings, RecordingsError, TemporaryRecording,
};
use nodedock_wasm::registry::previous_versions::PreviousVersions;

/// Seconds that a request may record.
pub const SECONDS_MAX: u32 = 3600;
/// Bytes of a message, and messages that wait for the reader.
const CHUNK_BYTES: usize = 1 << 20;
const CHUNKS_WAITING_MAX: usize = 2;

/// The stream of lines.
pub type Lines = ReceiverStream<Result<RecordDriverResponse, Status>>;

/// Recordings of the daemon, and the files of its drivers.
#[derive(Clone)]
pub struct RecordedDrivers {
    pub recordings: Recordings,
    pub previous_versions: Arc<PreviousVersions>,
    pub tasks: Tasks,
}

impl RecordedDrivers {
    /// Records for a while, if the request says so, and returns what is recorded. When the caller is gone, a recording for a while ends.
    pub async fn record(&self, request: RecordDriverRequest) -> Result<Lines, Status> {
        let RecordDriverRequest { name, seconds } = request;
        if seconds > SECONDS_MAX {
            let message = format!("{seconds} seconds to record, at most {SECONDS_MAX} are allowed");
            return Err(Status::invalid_argument(message));
        }
        let temporary = (seconds > 0)
            .then(|| self.recordings.begin(&name))
            .transpose()
            .map_err(refuse)?;
        tokio::select! {
            () = self.tasks.stopped() => return Err(Status::aborted("the daemon is stopping")),
            () = tokio::time::sleep(Duration::from_secs(seconds.into())) => {}
        }
        let recorded = self.recordings.read(&name).await.map_err(refuse)?;
        let (sender, lines) = mpsc::channel(CHUNKS_WAITING_MAX);
        let previous_versions = self.previous_versions.clone();
        // Safe to drop: the reader sees that the stream has no end.
        self.tasks.spawn_until_stopped("recording", async move {
            if let Err(status) = send(temporary, recorded, &previous_versions, &sender).await {
                // no error: the client no longer reads
                sender.send(Err(status)).await.ok();
            }
        });
        Ok(ReceiverStream::new(lines))
    }
}

fn refuse(error: RecordingsError) -> Status {
    let message = chain(&error);
    match error {
        RecordingsError::Unknown(_) => Status::not_found(message),
        RecordingsError::NotRecorded(_) => Status::failed_precondition(message),
        RecordingsError::Name(_) => Status::invalid_argument(message),
        RecordingsError::Io { .. } | RecordingsError::Ended => Status::internal(message),
    }
}

type Sender = mpsc::Sender<Result<RecordDriverResponse, Status>>;

/// Sends the segments, and the files of the drivers in them as far as they are still stored.
async fn send(
    temporary: Option<TemporaryRecording>,
    recorded: Recorded,
    previous_versions: &PreviousVersions,
    sender: &Sender,
) -> Result<(), Status> {
    let mut digests = BTreeSet::new();
    for segment in recorded.segments {
        let read = tokio::task::spawn_blocking(move || segment.read()).await;
        let text = read
            .map_err(|_| Status::aborted("the daemon is stopping"))?
            .map_err(|error| {
                Status::internal(format!("read a segment of the recording: {error}"))
            })?;
        let first = text.split(|byte| *byte == b'\n').next().unwrap_or_default();
        if let Ok(Line::<Raw>::Revision(revision)) = serde_json::from_slice(first)
            && revision.kind == Kind::Wasm
        {
            digests.insert(revision.digest);
        }
        send_text(text, sender).await?;
    }
    if recorded.lost > 0 {
        send_line(&Line::Lost(recorded.lost), sender).await?;
    }
    for digest in digests {
        match previous_versions.code(&digest).await {
            Ok(code) => {
                let file = Line::<Raw>::File(DriverFile {
                    digest,
                    base64: STANDARD.encode(code),
                });
                send_line(&file, sender).await?;
            }
            Err(error) => {
                tracing::info!(
                    digest,
                    error = chain(&error),
                    "a driver's file is not in the recording"
                );
            }
        }
    }
    // Not before: its end removes the segments.
    drop(temporary);
    Ok(())
}

async fn send_line(line: &Line<Raw>, sender: &Sender) -> Result<(), Status> {
    let mut text = serde_json::to_vec(line).map_err(|error| Status::internal(error.to_string()))?;
    text.push(b'\n');
    send_text(text, sender).await
}

async fn send_text(text: Vec<u8>, sender: &Sender) -> Result<(), Status> {
    for chunk in text.chunks(CHUNK_BYTES) {
        let message = RecordDriverResponse {
            lines: chunk.to_vec(),
        };
        sender
            .send(Ok(message))
            .await
            .map_err(|_| Status::cancelled("the caller is gone"))?;
    }
    Ok(())
}
