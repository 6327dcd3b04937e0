//! What follows a set of objects, against servers that do not behave.

use std::sync::Mutex;

use tokio::sync::mpsc;

use super::*;

type Part = std::io::Result<bytes::Bytes>;

/// What a follower was told, in order.
struct Recorder(mpsc::UnboundedSender<String>);

fn name(object: &Value) -> String {
    let meta = &object["metadata"];
    format!("{}@{}", meta["name"].as_str().unwrap(), meta["resourceVersion"].as_str().unwrap())
}

#[async_trait::async_trait]
impl Follower for Recorder {
    async fn listed(&self, objects: Vec<Value>) {
        let names: Vec<_> = objects.iter().map(name).collect();
        let _ = self.0.send(format!("listed {}", names.join(" ")));
    }

    async fn applied(&self, object: Value) {
        let _ = self.0.send(format!("applied {}", name(&object)));
    }

    async fn deleted(&self, object: Value) {
        let _ = self.0.send(format!("deleted {}", name(&object)));
    }
}

/// A server whose lists are given, and whose watches the test speaks for.
struct Server {
    api: Api,
    log: Arc<Mutex<Vec<fake::Asked>>>,
    watches: mpsc::UnboundedReceiver<mpsc::Sender<Part>>,
    tasks: Tasks,
    told: mpsc::UnboundedReceiver<String>,
    following: Option<Following>,
}

impl Server {
    fn new(list: impl Fn() -> fake::Answer + Send + Sync + 'static) -> Self {
        Self::with(
            Target {
                what: "things",
                path: Path::Fixed("/things".to_owned()),
                selection: Selection::fields("spec.nodeName=a"),
                resync: None,
            },
            list,
        )
    }

    fn with(target: Target, list: impl Fn() -> fake::Answer + Send + Sync + 'static) -> Self {
        let (opened, watches) = mpsc::unbounded_channel();
        let (api, log) = fake::api(move |asked| {
            std::future::ready(if asked.is_watch() {
                let (sender, answer) = fake::open();
                let _ = opened.send(sender);
                answer
            } else {
                list()
            })
        });
        let (tell, told) = mpsc::unbounded_channel();
        let tasks = Tasks::new();
        let following = api.follow(&tasks, target, Arc::new(Recorder(tell)));
        Self { api, log, watches, tasks, told, following: Some(following) }
    }

    async fn told(&mut self) -> String {
        self.told.recv().await.unwrap()
    }

    async fn opened(&mut self) -> mpsc::Sender<Part> {
        self.watches.recv().await.unwrap()
    }

    fn queries(&self) -> Vec<String> {
        self.log.lock().unwrap().iter().map(|asked| asked.query.clone()).collect()
    }

    async fn is(&self, wanted: Standing) {
        self.following.as_ref().unwrap().standing().wait_for(|standing| *standing == wanted).await.unwrap();
    }
}

fn two() -> fake::Answer {
    fake::list("10", &[fake::object("a", "3"), fake::object("b", "7")])
}

#[tokio::test(start_paused = true)]
async fn a_set_is_listed_and_then_watched_from_there() {
    let mut server = Server::new(two);
    assert!(server.following.as_ref().unwrap().synced().await);
    let watch = server.opened().await;
    server.is(Standing::Live).await;
    watch.send(fake::event("MODIFIED", &fake::object("a", "11"))).await.unwrap();
    watch.send(fake::event("BOOKMARK", &fake::object("", "40"))).await.unwrap();
    watch.send(fake::event("DELETED", &fake::object("b", "41"))).await.unwrap();
    watch.send(fake::event("ADDED", &fake::object("c", "42"))).await.unwrap();
    let mut told = Vec::new();
    for _ in 0..4 {
        told.push(server.told().await);
    }
    assert_eq!(told, ["listed a@3 b@7", "applied a@11", "deleted b@41", "applied c@42"]);
    let queries = server.queries();
    assert_eq!(queries[0], "limit=250&fieldSelector=spec.nodeName%3Da");
    let watch = "watch=true&allowWatchBookmarks=true&timeoutSeconds=290&resourceVersion=10&fieldSelector=spec.nodeName%3Da";
    assert_eq!(queries[1], watch);
    assert!(server.tasks.drain(Duration::from_secs(1)).await);
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_ends_goes_on_where_it_was_without_a_list() {
    let mut server = Server::new(two);
    let watch = server.opened().await;
    watch.send(fake::event("BOOKMARK", &fake::object("", "40"))).await.unwrap();
    drop(watch);
    let watch = server.opened().await;
    watch.send(fake::event("ADDED", &fake::object("c", "41"))).await.unwrap();
    watch.send(Err(std::io::Error::other("reset"))).await.unwrap();
    server.opened().await;
    let versions: Vec<_> = server
        .queries()
        .iter()
        .map(|query| query.contains("resourceVersion=40") || query.contains("resourceVersion=41"))
        .collect();
    assert_eq!(versions, [false, false, true, true]);
    assert_eq!([server.told().await, server.told().await], ["listed a@3 b@7", "applied c@41"]);
}

/// What was deleted while nobody watched is seen by the list that follows a 410.
#[tokio::test(start_paused = true)]
async fn a_version_that_is_too_old_leads_to_a_list() {
    let lists = AtomicUsize::new(0);
    let mut server = Server::new(move || match lists.fetch_add(1, Relaxed) {
        0 => two(),
        _ => fake::list("90", &[fake::object("b", "7")]),
    });
    let watch = server.opened().await;
    let gone =
        json!({"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"});
    watch.send(fake::event("ERROR", &gone)).await.unwrap();
    server.opened().await;
    assert_eq!([server.told().await, server.told().await], ["listed a@3 b@7", "listed b@7"]);
    assert!(server.queries().last().unwrap().contains("resourceVersion=90"));
}

#[tokio::test(start_paused = true)]
async fn a_server_that_closes_every_watch_at_once_is_not_hammered() {
    let mut server = Server::new(two);
    let start = Instant::now();
    for _ in 0..10 {
        drop(server.opened().await);
    }
    assert!(start.elapsed() > Duration::from_secs(60), "{:?}", start.elapsed());
    assert!(server.api.counts().watch_restarts >= 9);
    // The first that lasts ends the long delays.
    let watch = server.opened().await;
    tokio::time::sleep(limit::WATCH_STEADY).await;
    let ended = Instant::now();
    drop(watch);
    server.opened().await;
    assert!(ended.elapsed() <= limit::API_RETRY_MIN + Duration::from_millis(200), "{:?}", ended.elapsed());
}

#[tokio::test(start_paused = true)]
async fn rubbish_in_a_watch_leads_to_a_list_after_a_delay() {
    let mut server = Server::new(two);
    for rubbish in ["<html>\n", "{\"type\":\"ADDED\"}\n", "{}\n", "\0\n"] {
        server.opened().await.send(Ok(rubbish.into())).await.unwrap();
        assert_eq!(server.told().await, "listed a@3 b@7");
    }
    server.opened().await;
    assert_eq!(server.told().await, "listed a@3 b@7");
}

#[tokio::test(start_paused = true)]
async fn a_list_that_is_refused_is_tried_again_less_and_less_often() {
    let lists = Arc::new(AtomicUsize::new(0));
    let count = lists.clone();
    let mut server = Server::new(move || {
        count.fetch_add(1, Relaxed);
        fake::refusal(403, "Forbidden", "not you")
    });
    tokio::time::sleep(Duration::from_secs(600)).await;
    let asked = lists.load(Relaxed);
    assert!((20..=35).contains(&asked), "{asked}");
    assert_eq!(*server.following.as_ref().unwrap().standing().borrow(), Standing::Unlisted);
    assert!(server.told.try_recv().is_err());
}

#[tokio::test(start_paused = true)]
async fn a_silent_watch_is_replaced() {
    let mut server = Server::new(two);
    let silent = server.opened().await;
    let start = Instant::now();
    server.opened().await;
    assert!(start.elapsed() >= limit::WATCH_SILENCE && start.elapsed() < limit::WATCH_SILENCE * 2);
    assert!(silent.is_closed());
}

#[tokio::test(start_paused = true)]
async fn a_list_comes_anew_when_it_is_asked_for_or_due() {
    let target = Target {
        what: "things",
        path: Path::Fixed("/things".to_owned()),
        selection: Selection::default(),
        resync: Some(Duration::from_secs(3600)),
    };
    let mut server = Server::with(target, two);
    let _first = server.opened().await;
    server.told().await;
    server.following.as_ref().unwrap().list_again();
    assert_eq!(server.told().await, "listed a@3 b@7");
    let keep_alive = server.opened().await;
    let start = Instant::now();
    while server.told.try_recv().is_err() {
        tokio::time::sleep(Duration::from_secs(60)).await;
        let _ = keep_alive.send(fake::event("BOOKMARK", &fake::object("", "40"))).await;
    }
    assert!(
        start.elapsed().abs_diff(Duration::from_secs(3600)) <= Duration::from_secs(120),
        "{:?}",
        start.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn who_lets_go_ends_the_watch_and_a_drain_ends_all() {
    let mut server = Server::new(two);
    let watch = server.opened().await;
    server.is(Standing::Live).await;
    server.following = None;
    watch.closed().await;
    assert!(server.tasks.drain(Duration::from_secs(1)).await);

    let mut server = Server::new(two);
    let watch = server.opened().await;
    assert!(server.tasks.drain(Duration::from_secs(1)).await);
    watch.closed().await;
    assert!(
        server.following.as_ref().unwrap().standing().wait_for(|s| *s == Standing::Behind).await.is_err()
    );
}

#[tokio::test(start_paused = true)]
async fn a_set_moves_with_the_version_that_is_served() {
    let served = Arc::new(Mutex::new("v1beta1"));
    let (opened, mut watches) = mpsc::unbounded_channel();
    let now = served.clone();
    let (api, log) = fake::api(move |asked| {
        let served = *now.lock().unwrap();
        std::future::ready(if asked.path == version::GROUP_PATH {
            fake::group(&[served])
        } else if !asked.path.contains(&format!("/{served}/")) {
            fake::answer(
                404,
                &json!({"kind": "Status", "code": 404, "message": "the server could not find the requested resource", "details": {}}),
            )
        } else if asked.is_watch() {
            let (sender, answer) = fake::open();
            let _ = opened.send(sender);
            answer
        } else {
            two()
        })
    });
    let (tell, mut told) = mpsc::unbounded_channel();
    let target = Target {
        what: "slices",
        path: Path::versioned(Version::slices),
        selection: Selection::default(),
        resync: None,
    };
    let following = api.follow(&Tasks::new(), target, Arc::new(Recorder(tell)));
    let watch = watches.recv().await.unwrap();
    *served.lock().unwrap() = "v1";
    drop(watch);
    let _watch = watches.recv().await.unwrap();
    assert_eq!(
        [told.recv().await.unwrap(), told.recv().await.unwrap()],
        ["listed a@3 b@7", "listed a@3 b@7"]
    );
    let path = log.lock().unwrap().last().unwrap().path.clone();
    assert_eq!(path, Version::V1.slices());
    drop(following);
}
