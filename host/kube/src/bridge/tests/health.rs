//! Health as a kubelet watches it.

use native_null::{Options, Plugin, Script, Versions};
use nodedock_proto::kubelet::dra_health::v1::dra_resource_health_client::DraResourceHealthClient as V1;
use nodedock_proto::kubelet::dra_health::v1alpha1::dra_resource_health_client::DraResourceHealthClient as V1alpha1;
use nodedock_proto::kubelet::dra_health::{v1, v1alpha1};
use tokio::sync::mpsc;
use tonic::{Code, Status, Streaming};

use super::*;
use crate::bridge::health::Face;
use nodedock_model::limit::{BRIDGE_HEALTH_STREAMS_MAX, HEALTH_RESEND};
use nodedock_native::device_plugins::DevicePlugins;
use nodedock_native::plugins::{PluginTimes, Plugins};
use nodedock_native::sockets as plugin_sockets;

async fn watch(home: &Home) -> Streaming<v1::NodeWatchResourcesResponse> {
    let mut client = V1::new(channel(&home.service(GPU)).await);
    soon(client.node_watch_resources(v1::NodeWatchResourcesRequest {})).await.unwrap().into_inner()
}

/// `DEVICE STATE WORDS` of each device of the next message.
async fn list(stream: &mut Streaming<v1::NodeWatchResourcesResponse>) -> Result<Vec<String>, Status> {
    let message = soon(stream.message()).await?.ok_or_else(|| Status::cancelled("the stream ended"))?;
    let line = |device: v1::DeviceHealth| {
        let state = device.health().as_str_name().to_lowercase();
        assert_eq!(device.health_check_timeout_seconds, 30);
        assert!(device.last_updated_time > 1_700_000_000);
        let named = device.device.unwrap();
        assert_eq!(named.pool_name, "pool");
        format!("{} {state} {}", named.device_name, device.message).trim_end().to_owned()
    };
    Ok(message.devices.into_iter().map(line).collect())
}

#[tokio::test]
async fn a_full_list_comes_first_and_another_with_each_change_of_health() {
    let home = Home::new();
    let gpu = home.serve(GPU);
    gpu.send_replace(published(&[("a", Some(true), ""), ("b", None, "")]));
    let running = home.start();
    running.open(GPU).await;
    let mut stream = watch(&home).await;
    assert_eq!(list(&mut stream).await.unwrap(), ["a healthy", "b unknown"]);
    gpu.send_replace(published(&[("a", Some(true), ""), ("b", None, "")]));
    running.looked().await;
    gpu.send_replace(published(&[("a", Some(true), ""), ("b", Some(false), "hot")]));
    assert_eq!(list(&mut stream).await.unwrap(), ["a healthy", "b unhealthy hot"]);

    let mut older = V1alpha1::new(channel(&home.service(GPU)).await);
    let mut older =
        older.node_watch_resources(v1alpha1::NodeWatchResourcesRequest {}).await.unwrap().into_inner();
    let first = soon(older.message()).await.unwrap().unwrap();
    assert_eq!((first.devices.len(), &first.devices[1].message[..]), (2, "hot"));
    assert_eq!(first.devices[1].health(), v1alpha1::HealthStatus::Unhealthy);

    // A driver that replaces it goes on in the same stream.
    let replaced = home.serve(GPU);
    drop(gpu);
    replaced.send_replace(published(&[("c", Some(true), "new")]));
    assert_eq!(list(&mut stream).await.unwrap(), ["c healthy new"]);
    running.drain().await;
    assert_eq!(soon(stream.message()).await.unwrap(), None, "the stream ends with the bridge");
}

/// A kubelet that is told that there is no such service does not ask again.
#[tokio::test]
async fn a_driver_that_loads_or_tells_no_health_is_waited_for_in_the_same_stream() {
    let home = Home::new();
    let running = Running::start(BridgeParts { remembered: vec![name(GPU)], ..home.parts() });
    running.open(GPU).await;
    let mut stream = watch(&home).await;
    let old = home.serve(GPU);
    old.send_replace(published(&[("a", None, ""), ("b", None, "")]));
    running.looked().await;
    let none = tokio::time::timeout(Duration::from_millis(50), stream.message()).await;
    assert!(none.is_err(), "{none:?}");
    let new = home.serve(GPU);
    drop(old);
    new.send_replace(published(&[("a", Some(true), ""), ("b", None, "")]));
    assert_eq!(list(&mut stream).await.unwrap(), ["a healthy", "b unknown"]);
}

#[tokio::test]
async fn streams_are_bounded_and_those_that_end_make_room() {
    let home = Home::new();
    let gpu = home.serve(GPU);
    gpu.send_replace(published(&[("a", Some(true), "")]));
    let running = home.start();
    running.open(GPU).await;
    let mut client = V1::new(channel(&home.service(GPU)).await);
    let mut streams = Vec::new();
    for _ in 0..BRIDGE_HEALTH_STREAMS_MAX {
        streams
            .push(client.node_watch_resources(v1::NodeWatchResourcesRequest {}).await.unwrap().into_inner());
    }
    let status = client.node_watch_resources(v1::NodeWatchResourcesRequest {}).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    drop(streams);
    let again = async {
        while client.node_watch_resources(v1::NodeWatchResourcesRequest {}).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    soon(again).await;
}

/// No sockets here: the clock stands while nothing is due.
#[tokio::test(start_paused = true)]
async fn a_list_that_stays_the_same_is_told_again_in_time_and_a_flapping_one_not_at_each_change() {
    use futures::StreamExt;

    let home = Home::new();
    let gpu = home.serve(GPU);
    gpu.send_replace(published(&[("a", Some(true), "")]));
    let parts = home.parts();
    let ground = Ground {
        registry: parts.registry,
        pool_names: parts.pool_names,
        claims: parts.claims,
        conditions: parts.conditions,
        counters: Arc::default(),
        tasks: parts.tasks.clone(),
        settled_at: Instant::now(),
    };
    let offer = Arc::new(Offer::new(name(GPU), "/x".into(), ground));
    let face = Face { offer, tasks: parts.tasks.clone() };
    let mut lists = Box::pin(face.lists().unwrap());
    let began = Instant::now();
    assert_eq!(lists.next().await.unwrap().len(), 1);
    assert_eq!(lists.next().await.unwrap().len(), 1);
    assert_eq!(began.elapsed().as_secs(), HEALTH_RESEND.as_secs());
    let flapping = tokio::spawn(async move {
        for n in 0..1000 {
            gpu.send_replace(published(&[("a", Some(n % 2 == 0), "")]));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        gpu
    });
    let (mut told, began) = (0, Instant::now());
    while began.elapsed() < Duration::from_secs(1) {
        lists.next().await.unwrap();
        told += 1;
    }
    assert!((5..=12).contains(&told), "{told}");
    let _gpu = flapping.await.unwrap();
    parts.tasks.stop();
    assert!(lists.next().await.is_none());
}

#[tokio::test]
async fn a_native_plugin_is_offered_with_what_it_says_of_its_health() {
    let home = Home::new();
    let ours = home.dir.path().join("ours");
    std::fs::create_dir(&ours).unwrap();
    let running = home.start();
    let (sender, events) = mpsc::channel(16);
    let plugins = Plugins {
        registry: home.registry.clone(),
        device_plugins: DevicePlugins::default(),
        times: PluginTimes::default(),
        tasks: running.tasks.clone(),
    };
    running.tasks.spawn("plugins", plugins.run(events));
    running.tasks.spawn("sockets", plugin_sockets::watch(ours.clone(), running.tasks.clone(), sender));
    let mut options = Options::new(GPU, &ours, &home.dir.path().join("plugins"));
    options.versions = Versions { health_v1: true, ..Versions::default() };
    let plugin = Plugin::start(options, Script::ok("v")).await.unwrap();
    running.open(GPU).await;
    let mut stream = watch(&home).await;
    let said = |healthy| native_null::DeviceHealth {
        pool: "pool".into(),
        device: "a".into(),
        state: if healthy { native_null::HealthState::Healthy } else { native_null::HealthState::Unhealthy },
        message: "says the plugin".into(),
        timeout_seconds: 0,
    };
    plugin.report_health(vec![said(true)]);
    assert_eq!(list(&mut stream).await.unwrap(), ["a healthy says the plugin"]);
    plugin.report_health(vec![said(false)]);
    assert_eq!(list(&mut stream).await.unwrap(), ["a unhealthy says the plugin"]);
    // Lost, it is still offered; deregistered, it is not.
    plugin.disconnect();
    running.looked().await;
    assert!(home.registration(GPU).exists());
    plugin.unregister().unwrap();
    running.until("withdrawn", |running| running.status(GPU).is_none()).await;
    assert!(!home.registration(GPU).exists());
}
