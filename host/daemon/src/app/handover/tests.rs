//! Instances that ask each other on a root of their own, without a daemon behind.

use std::path::Path;
use std::sync::Arc;

use tokio::time::{Duration, Instant};

use super::asker::{self, Taken};
use super::holder::Holder;
use super::place::Place;
use crate::config::Paths;
use nodedock_model::{Uid, limit};

fn place(folder: &Path, instance: &str) -> Arc<Place> {
    let paths = Paths::below(folder);
    for file in [&paths.instance_lock, &paths.handover] {
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    }
    Arc::new(Place::new(&paths, Uid::new(instance).unwrap()))
}

async fn taken(place: &Place) -> Taken {
    asker::take(place, |_| ()).await.unwrap()
}

fn taking(place: &Arc<Place>) -> tokio::task::JoinHandle<anyhow::Result<Taken>> {
    let place = place.clone();
    tokio::spawn(async move { asker::take(&place, |_| ()).await })
}

#[tokio::test]
async fn a_newer_instance_is_given_the_place_when_it_is_released_and_not_before() {
    let folder = tempfile::tempdir().unwrap();
    let (old, new) = (place(folder.path(), "old"), place(folder.path(), "new"));
    let first = taken(&old).await;
    let mut holder = Holder::open(&old).await.unwrap();
    let second = taking(&new);
    let mut successor = holder.asked().await;
    assert_eq!(successor.instance.as_str(), "new");
    assert!(new.try_take().unwrap().is_none() && !second.is_finished());
    drop((holder, first));
    assert!(successor.release(&old.instance).await);
    let mut second = second.await.unwrap().unwrap();
    let before = second.before.as_mut().unwrap();
    assert_eq!(before.instance.as_str(), "old");
    before.serving().await;
    assert!(successor.serves(limit::HANDOVER_SOCKETS).await);
}

#[tokio::test]
async fn an_older_instance_stands_by_until_the_newer_is_gone_and_then_has_the_place() {
    let folder = tempfile::tempdir().unwrap();
    let (old, new) = (place(folder.path(), "old"), place(folder.path(), "new"));
    old.note();
    let newer = taken(&new).await;
    let mut holder = Holder::open(&new).await.unwrap();
    let (words, mut said) = tokio::sync::mpsc::unbounded_channel();
    let older = {
        let old = old.clone();
        tokio::spawn(async move { asker::take(&old, |word| words.send(word).unwrap()).await })
    };
    let stands_by =
        async { while !said.recv().await.unwrap().contains("stands by: the newer instance new") {} };
    tokio::select! {
        () = stands_by => {}
        _ = holder.asked() => panic!("an older instance is given the place"),
    }
    drop((holder, newer));
    let again = older.await.unwrap().unwrap();
    assert!(again.before.is_none());
    // The newer one is back, and has it again.
    let mut holder = Holder::open(&old).await.unwrap();
    let second = taking(&new);
    assert_eq!(holder.asked().await.instance.as_str(), "new");
    drop((holder, again));
    second.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_predecessor_that_dies_while_it_hands_over_leaves_the_place_free() {
    let folder = tempfile::tempdir().unwrap();
    let (old, new) = (place(folder.path(), "old"), place(folder.path(), "new"));
    let first = taken(&old).await;
    let mut holder = Holder::open(&old).await.unwrap();
    let second = taking(&new);
    let successor = holder.asked().await;
    // Its end takes the connection and the lock together.
    drop((successor, holder, first));
    assert!(second.await.unwrap().unwrap().before.is_none());
}

#[tokio::test]
async fn a_successor_that_dies_is_noticed_before_and_after_the_release() {
    let folder = tempfile::tempdir().unwrap();
    let (old, new) = (place(folder.path(), "old"), place(folder.path(), "new"));
    let _first = taken(&old).await;
    let mut holder = Holder::open(&old).await.unwrap();
    for _ in 0..2 {
        let second = taking(&new);
        let mut successor = holder.asked().await;
        second.abort();
        assert!(second.await.is_err_and(|error| error.is_cancelled()));
        let heard = successor.release(&old.instance).await && successor.serves(limit::HANDOVER_SOCKETS).await;
        assert!(!heard);
        successor.gone().await;
    }
}

#[tokio::test]
async fn the_same_instance_twice_is_refused_and_strangers_keep_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let (old, new) = (place(folder.path(), "old"), place(folder.path(), "new"));
    let _first = taken(&old).await;
    let mut holder = Holder::open(&old).await.unwrap();
    let twice = taking(&old);
    let refused = tokio::select! {
        refused = twice => refused.unwrap().err().unwrap().to_string(),
        _ = holder.asked() => panic!("it asks itself"),
    };
    assert!(refused.contains("serves as instance old") && refused.contains("--instance-uid"), "{refused}");

    use tokio::io::AsyncWriteExt;
    let mut stranger = tokio::net::UnixStream::connect(&old.door).await.unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let _second = taking(&new);
    assert_eq!(holder.asked().await.instance.as_str(), "new");
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_never_answers_ends_the_start_with_a_word() {
    let folder = tempfile::tempdir().unwrap();
    let (old, new) = (place(folder.path(), "old"), place(folder.path(), "new"));
    let _first = taken(&old).await;
    let began = Instant::now();
    let error = asker::take(&new, |_| ()).await.err().unwrap().to_string();
    assert!(error.contains("instance.lock") && error.contains("handover.sock"), "{error}");
    assert!(began.elapsed() < limit::HANDOVER_SILENT + Duration::from_secs(5), "{:?}", began.elapsed());
}
