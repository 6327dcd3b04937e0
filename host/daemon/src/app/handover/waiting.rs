//! The side of an instance that does not serve: it takes the lease when that is free, requests the handover from the instance that
//! serves, and is on standby while that one is newer.

use std::io;
use std::time::Duration;

use anyhow::{Result, bail};
use tokio::net::UnixStream;
use tokio::time::{Instant, sleep};

use super::message::{Connection, Message, Peer};
use super::shared_root::{Lease, SharedRoot};
use crate::app::handover::{HANDOVER_MESSAGE, HANDOVER_PATIENCE};
use nodedock_base::backoff::Backoff;
use nodedock_base::error::chain;
use nodedock_base::listeners::Listeners;

/// Time that a start waits for an unresponsive owner of the lock.
pub(crate) const HANDOVER_SILENT: Duration = Duration::from_secs(90);

/// Interval of checking whether the lock is free.
const HANDOVER_RETRY_MIN: Duration = Duration::from_millis(20);
const HANDOVER_RETRY_MAX: Duration = Duration::from_secs(2);

/// Deadline of the previous instance to finish its calls and close the checkpoint: three drains, and the close.
const HANDOVER_RELEASE: Duration = Duration::from_secs(75);

/// The end of a request.
enum HandoverOutcome {
    Released(Peer),
    /// A newer instance served, and has ended.
    Ended,
    /// There was no answer that makes sense.
    Silence,
}

/// Waits for the lease, and returns it with the instance that handed over, if one did: its sockets are among `listeners` then. `report` is
/// called with what is waited for.
pub(super) async fn acquire(
    root: &SharedRoot,
    listeners: &Listeners,
    report: impl Fn(String),
) -> Result<(Lease, Option<Peer>)> {
    let (mut backoff, mut silent_since) = (new_backoff(), None);
    loop {
        if let Some(lease) = root.try_lock()? {
            return Ok((lease, None));
        }
        match request(root, listeners, &report).await? {
            HandoverOutcome::Released(previous) => match released_lease(root).await? {
                Some(lease) => return Ok((lease, Some(previous))),
                None => silent_since = None,
            },
            HandoverOutcome::Ended => {
                (backoff, silent_since) = (new_backoff(), None);
                sleep(HANDOVER_PATIENCE).await;
            }
            HandoverOutcome::Silence => {
                let since = *silent_since.get_or_insert_with(Instant::now);
                if since.elapsed() > HANDOVER_SILENT {
                    let (lock, socket) = (
                        root.paths.instance_lock.display(),
                        root.paths.handover.display(),
                    );
                    bail!(
                        "another instance holds {lock} and does not answer on {socket}: stop it, or see what it hangs in"
                    );
                }
                report("it waits for the instance before, which does not answer".to_owned());
                sleep(backoff.delay()).await;
            }
        }
    }
}

fn new_backoff() -> Backoff {
    Backoff::new(HANDOVER_RETRY_MIN, HANDOVER_RETRY_MAX)
}

async fn request(
    root: &SharedRoot,
    listeners: &Listeners,
    report: &impl Fn(String),
) -> Result<HandoverOutcome> {
    let Ok(stream) = UnixStream::connect(&root.paths.handover).await else {
        return Ok(HandoverOutcome::Silence);
    };
    let mut connection = Connection::new(stream);
    report("it waits for the instance before to hand over".to_owned());
    let answer = async {
        connection
            .send(&Message::Ask {
                instance: root.instance.clone(),
            })
            .await?;
        connection.adopt(listeners, HANDOVER_RELEASE).await
    };
    match answer.await {
        Ok(Some(Message::Released { instance })) => {
            return Ok(HandoverOutcome::Released(Peer {
                instance,
                connection,
            }));
        }
        Ok(Some(Message::StandBy { instance })) => {
            tracing::info!(serves = %instance, "a newer instance serves; standing by");
            report(format!(
                "it is on standby: the newer instance {instance} serves"
            ));
            connection.closed().await;
            return Ok(HandoverOutcome::Ended);
        }
        Ok(Some(Message::Refused { why })) => {
            bail!("{why}: each needs an --instance-uid of its own")
        }
        Ok(Some(message)) => {
            tracing::debug!(
                message = message.word(),
                "the instance that serves answered with a message that makes no sense"
            );
        }
        Ok(None) => {}
        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
            tracing::warn!("the instance that serves does not hand over in time, retrying");
        }
        Err(error) => tracing::debug!(
            error = chain(&error),
            "the instance that serves was not understood"
        ),
    }
    Ok(HandoverOutcome::Silence)
}

/// Takes the lease that was released. `None`: another instance was faster.
async fn released_lease(root: &SharedRoot) -> Result<Option<Lease>> {
    let until = Instant::now() + HANDOVER_MESSAGE;
    loop {
        let lease = root.try_lock()?;
        if lease.is_some() || Instant::now() >= until {
            return Ok(lease);
        }
        sleep(HANDOVER_RETRY_MIN).await;
    }
}
