//! Health as a kubelet watches it.

use futures::StreamExt;
use nodedock_proto::kubelet::dra_health::v1::dra_resource_health_client::DraResourceHealthClient as V1;
use nodedock_proto::kubelet::dra_health::v1alpha1::dra_resource_health_client::DraResourceHealthClient as V1alpha1;
use nodedock_proto::kubelet::dra_health::{v1, v1alpha1};
use std::time::Duration;
use tonic::{Code, Status, Streaming};

use super::*;
use crate::bridge::dra::BRIDGE_HEALTH_STREAMS_MAX;
use crate::bridge::dra::health::HEALTH_RESEND;

fn devices(devices: &[(&str, Option<bool>, &str)]) -> Arc<Published> {
    let named = devices
        .iter()
        .map(|(device, is_healthy, message)| ((*device).to_owned(), *is_healthy, *message));
    Arc::new(published("pool", None, named))
}

/// Lets the GPU driver serve, which publishes its devices.
fn serve(node: &Node) -> watch::Sender<Arc<Published>> {
    let (published, inventory) = watch::channel(Arc::default());
    node.serve_with(GPU, Some(inventory));
    published
}

async fn watch(node: &Node) -> Streaming<v1::NodeWatchResourcesResponse> {
    let mut client = V1::new(connect(&node.service(GPU)).await.unwrap());
    soon(client.node_watch_resources(v1::NodeWatchResourcesRequest {}))
        .await
        .unwrap()
        .into_inner()
}

/// `DEVICE STATE MESSAGE` of each device of the next message.
async fn list(
    stream: &mut Streaming<v1::NodeWatchResourcesResponse>,
) -> Result<Vec<String>, Status> {
    let message = soon(stream.message())
        .await?
        .ok_or_else(|| Status::cancelled("the stream ended"))?;
    let line = |device: v1::DeviceHealth| {
        let state = device.health().as_str_name().to_lowercase();
        assert_eq!(device.health_check_timeout_seconds, 30);
        assert!(device.last_updated_time > 1_700_000_000);
        let named = device.device.unwrap();
        assert_eq!(named.pool_name, "node-1/pool");
        format!("{} {state} {}", named.device_name, device.message)
            .trim_end()
            .to_owned()
    };
    Ok(message.devices.into_iter().map(line).collect())
}

#[tokio::test]
async fn health_stream_sends_full_list_first() {
    let node = Node::new();
    let gpu = serve(&node);
    gpu.send_replace(devices(&[("a", Some(true), ""), ("b", None, "")]));
    let running = node.start();
    running.open(GPU).await;
    let mut stream = watch(&node).await;
    assert_eq!(list(&mut stream).await.unwrap(), ["a healthy", "b unknown"]);
    gpu.send_replace(devices(&[("a", Some(true), ""), ("b", None, "")]));
    running.looked().await;
    gpu.send_replace(devices(&[("a", Some(true), ""), ("b", Some(false), "hot")]));
    assert_eq!(
        list(&mut stream).await.unwrap(),
        ["a healthy", "b unhealthy hot"]
    );

    let mut older = V1alpha1::new(connect(&node.service(GPU)).await.unwrap());
    let mut older = older
        .node_watch_resources(v1alpha1::NodeWatchResourcesRequest {})
        .await
        .unwrap()
        .into_inner();
    let first = soon(older.message()).await.unwrap().unwrap();
    assert_eq!(
        (first.devices.len(), &first.devices[1].message[..]),
        (2, "hot")
    );
    assert_eq!(first.devices[1].health(), v1alpha1::HealthStatus::Unhealthy);

    // A driver that replaces it continues in the same stream.
    let replaced = serve(&node);
    drop(gpu);
    replaced.send_replace(devices(&[("c", Some(true), "new")]));
    assert_eq!(list(&mut stream).await.unwrap(), ["c healthy new"]);
    running.drain().await;
    assert_eq!(
        soon(stream.message()).await.unwrap(),
        None,
        "the stream ends with the bridge"
    );
}

/// A kubelet does not retry once it got the answer that there is no such service.
#[tokio::test]
async fn health_stream_waits_for_driver() {
    let node = Node::new();
    node.offered_by("other").await;
    let running = node.start();
    running.open(GPU).await;
    let mut stream = watch(&node).await;
    let old = serve(&node);
    old.send_replace(devices(&[("a", None, ""), ("b", None, "")]));
    running.looked().await;
    let new = serve(&node);
    drop(old);
    new.send_replace(devices(&[("a", Some(true), ""), ("b", None, "")]));
    assert_eq!(list(&mut stream).await.unwrap(), ["a healthy", "b unknown"]);
}

#[tokio::test]
async fn health_streams_are_bounded() {
    let node = Node::new();
    let gpu = serve(&node);
    gpu.send_replace(devices(&[("a", Some(true), "")]));
    let running = node.start();
    running.open(GPU).await;
    let mut client = V1::new(connect(&node.service(GPU)).await.unwrap());
    let mut streams = Vec::new();
    for _ in 0..BRIDGE_HEALTH_STREAMS_MAX {
        streams.push(
            client
                .node_watch_resources(v1::NodeWatchResourcesRequest {})
                .await
                .unwrap()
                .into_inner(),
        );
    }
    let status = client
        .node_watch_resources(v1::NodeWatchResourcesRequest {})
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    drop(streams);
    let again = async {
        while client
            .node_watch_resources(v1::NodeWatchResourcesRequest {})
            .await
            .is_err()
        {
            tokio::task::yield_now().await;
        }
    };
    soon(again).await;
}

/// Uses no sockets: the paused clock advances only to the next timer.
#[tokio::test(start_paused = true)]
async fn health_lists_are_resent_and_coalesced() {
    let node = Node::new();
    let gpu = serve(&node);
    gpu.send_replace(devices(&[("a", Some(true), "")]));
    let parts = node.parts();
    let tasks = parts.tasks.clone();
    let bridge = Bridge::new(parts).unwrap();
    let driver = Arc::new(dra::OfferedDriver::new(name(GPU), bridge.0.clone()));
    let service = dra::HealthService {
        driver,
        tasks: tasks.clone(),
    };
    let mut lists = Box::pin(service.lists().unwrap());
    let began = Instant::now();
    assert_eq!(lists.next().await.unwrap().len(), 1);
    assert_eq!(lists.next().await.unwrap().len(), 1);
    assert_eq!(began.elapsed().as_secs(), HEALTH_RESEND.as_secs());
    let flapping = tokio::spawn(async move {
        for n in 0..1000 {
            gpu.send_replace(devices(&[("a", Some(n % 2 == 0), "")]));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        gpu
    });
    let (mut sent, began) = (0, Instant::now());
    while began.elapsed() < Duration::from_secs(1) {
        lists.next().await.unwrap();
        sent += 1;
    }
    assert!((5..=12).contains(&sent), "{sent}");
    let _gpu = flapping.await.unwrap();
    tasks.stop();
    assert!(lists.next().await.is_none());
}
