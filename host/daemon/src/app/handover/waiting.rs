//! The side of an instance that has not the place yet: takes it when it is free, asks who has it, and stands by where that one is newer.

use std::io;

use anyhow::{Result, bail};
use tokio::net::UnixStream;
use tokio::time::{Instant, sleep};

use super::place::{Lease, Place};
use super::words::{Talk, Word};
use nodedock_base::backoff::Backoff;
use nodedock_base::error::chain;
use nodedock_model::{Uid, limit};

/// The place, and who had it before and waits to hear that its sockets are for nobody any more.
pub(super) struct Taken {
    pub(super) lease: Lease,
    pub(super) before: Option<Predecessor>,
}

pub(super) struct Predecessor {
    pub(super) instance: Uid,
    talk: Talk,
}

impl Predecessor {
    /// Tells it that the kubelet knows this instance. It is kept: by its end the other learns of ours.
    pub(super) async fn serving(&mut self) {
        if let Err(error) = self.talk.say(&Word::Serving).await {
            tracing::debug!(error = chain(&error), "the instance before is gone already");
        }
    }
}

/// What came of asking.
enum Answer {
    Released(Predecessor),
    /// Somebody newer served, and its end has come.
    Over,
    /// Nobody answered.
    Silence,
}

/// Waits for the place. `say` is told what is waited for.
pub(super) async fn take(place: &Place, say: impl Fn(String)) -> Result<Taken> {
    let mut backoff = Backoff::new(limit::HANDOVER_RETRY_MIN, limit::HANDOVER_RETRY_MAX);
    let mut silent_since = None;
    loop {
        if let Some(lease) = place.try_take()? {
            return Ok(Taken { lease, before: None });
        }
        match ask(place, &say).await? {
            Answer::Released(before) => match taken(place, before).await? {
                Some(taken) => return Ok(taken),
                None => silent_since = None,
            },
            Answer::Over => {
                (backoff, silent_since) =
                    (Backoff::new(limit::HANDOVER_RETRY_MIN, limit::HANDOVER_RETRY_MAX), None);
                sleep(limit::HANDOVER_PATIENCE).await;
            }
            Answer::Silence => {
                let since = *silent_since.get_or_insert_with(Instant::now);
                if since.elapsed() > limit::HANDOVER_SILENT {
                    bail!(
                        "another instance holds {} and does not answer on {}: stop it, or see what it hangs in",
                        place.lock_path().display(),
                        place.door.display()
                    );
                }
                say("it waits for the instance before, which does not answer".to_owned());
                sleep(backoff.delay()).await;
            }
        }
    }
}

async fn ask(place: &Place, say: &impl Fn(String)) -> Result<Answer> {
    let Ok(stream) = UnixStream::connect(&place.door).await else { return Ok(Answer::Silence) };
    let mut talk = Talk::new(stream);
    let asked = talk.say(&Word::Ask { instance: place.instance.clone() }).await;
    say("it waits for the instance before to hand over".to_owned());
    let heard = match asked {
        Ok(()) => talk.hear(limit::HANDOVER_RELEASE).await,
        Err(error) => Err(error),
    };
    match heard {
        Ok(Some(Word::Released { instance })) => Ok(Answer::Released(Predecessor { instance, talk })),
        Ok(Some(Word::StandBy { instance })) => {
            tracing::info!(serves = %instance, "a newer instance serves; standing by");
            say(format!("it stands by: the newer instance {instance} serves"));
            talk.gone().await;
            Ok(Answer::Over)
        }
        Ok(Some(Word::Refused { why })) => bail!("{why}: each needs an --instance-uid of its own"),
        Ok(Some(word @ (Word::Ask { .. } | Word::Serving))) => {
            tracing::debug!(?word, "the instance that serves says what makes no sense");
            Ok(Answer::Silence)
        }
        Ok(None) => Ok(Answer::Silence),
        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
            tracing::warn!("the instance that serves does not hand over in time; asking again");
            Ok(Answer::Silence)
        }
        Err(error) => {
            tracing::debug!(error = chain(&error), "the instance that serves was not understood");
            Ok(Answer::Silence)
        }
    }
}

/// Takes the place that was released. None: somebody else was faster.
async fn taken(place: &Place, before: Predecessor) -> Result<Option<Taken>> {
    let until = Instant::now() + limit::HANDOVER_WORD;
    loop {
        if let Some(lease) = place.try_take()? {
            return Ok(Some(Taken { lease, before: Some(before) }));
        }
        if Instant::now() >= until {
            return Ok(None);
        }
        sleep(limit::HANDOVER_RETRY_MIN).await;
    }
}
