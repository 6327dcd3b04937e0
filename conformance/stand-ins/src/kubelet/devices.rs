//! The device manager: device plugins, their devices, and what is allocated of them.

use std::collections::BTreeSet;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use nodedock_proto::kubelet::device_plugin::v1beta1::device_plugin_client::DevicePluginClient;
use nodedock_proto::kubelet::device_plugin::v1beta1::registration_server::{
    Registration, RegistrationServer,
};
use nodedock_proto::kubelet::device_plugin::v1beta1::{
    AllocateRequest, ContainerAllocateRequest, ContainerPreferredAllocationRequest, Empty,
    PreferredAllocationRequest, RegisterRequest,
};
use nodedock_proto::unix;
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::transport::{Channel, Server};
use tonic::{Request, Response, Status, Streaming};

use super::authority;
use super::device_plugin::{Allocation, Plugin};
use super::state::Shared;

/// Allocate and preferred allocations have no deadline; a test has.
const NO_DEADLINE: Duration = crate::deadline::DEADLINE;

/// Deletes the sockets of plugins and serves `Register` on a new one of its own.
///
/// # Panics
///
/// If the directory cannot be read, or the socket cannot be made.
pub(super) fn serve(shared: &Arc<Shared>, end: &CancellationToken, tasks: &TaskTracker) {
    let dir = shared.root.join("device-plugins");
    for entry in std::fs::read_dir(&dir).expect("the directory can be read") {
        let entry = entry.expect("the directory can be read");
        let kind = entry.file_type().expect("the directory has types");
        if kind.is_socket() {
            let _ = std::fs::remove_file(entry.path());
        }
    }
    let listener = UnixListener::bind(dir.join("kubelet.sock")).expect("kubelet.sock can be made");
    let service = RegistrationServer::new(Registering {
        shared: Arc::clone(shared),
        end: end.clone(),
    });
    let server = Server::builder().add_service(service);
    let end = end.clone();
    tasks.spawn(async move {
        tokio::select! {
            () = end.cancelled() => {}
            _ = server.serve_with_incoming(unix::incoming(listener)) => {}
        }
    });
}

struct Registering {
    shared: Arc<Shared>,
    end: CancellationToken,
}

#[tonic::async_trait]
impl Registration for Registering {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let request = request.into_inner();
        let endpoint = self
            .shared
            .root
            .join("device-plugins")
            .join(&request.endpoint);
        let done = async {
            if self.end.is_cancelled() {
                return Err("the kubelet stops".to_owned());
            }
            validate(&request.resource_name, &request.version)?;
            connect(&self.shared, &request.resource_name, &endpoint).await
        }
        .await;
        self.shared
            .note_outcome("Register", &request.resource_name, done.clone());
        done.map(|()| Response::new(Empty {}))
            .map_err(Status::unknown)
    }
}

/// Checks a registration as a kubelet does.
fn validate(resource: &str, version: &str) -> Result<(), String> {
    if version != "v1beta1" {
        return Err(format!(
            "manager version, v1beta1, is not the plugin's, {version}"
        ));
    }
    let native = |domain: &str| domain == "kubernetes.io" || domain.ends_with(".kubernetes.io");
    let part = |text: &str, most: usize| {
        let edge = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
        let shared = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        text.len() <= most
            && edge(text.bytes().next())
            && edge(text.bytes().last())
            && text.bytes().all(shared)
    };
    let is_extended = resource.split_once('/').is_some_and(|(domain, name)| {
        !native(domain)
            && !domain.starts_with("requests.")
            && part(domain, 253 - "requests.".len())
            && part(name, 63)
    });
    if is_extended {
        Ok(())
    } else {
        Err(format!("the ResourceName {resource:?} is invalid"))
    }
}

/// Dials a plugin, asks for its options and follows its list.
async fn connect(shared: &Arc<Shared>, resource: &str, endpoint: &Path) -> Result<(), String> {
    let deadline = shared.options.dial_timeout;
    let (channel, _) = authority::channel(authority::dial(endpoint, deadline).await?, None).await?;
    let mut client = DevicePluginClient::new(channel.clone());
    let asking = client.get_device_plugin_options(Empty {});
    let options = shared
        .call("GetDevicePluginOptions", resource, deadline, asking)
        .await?
        .into_inner();
    let end = CancellationToken::new();
    let number = shared.change(|state| {
        let number = state.number();
        let before = state.plugins.remove(resource);
        let devices = before.map_or_else(Vec::new, |before| {
            before.end.cancel();
            before.devices
        });
        let plugin = Plugin {
            number,
            channel: Some(channel),
            options,
            devices,
            running: false,
            end: end.clone(),
        };
        state.plugins.insert(resource.to_owned(), plugin);
        number
    });
    let (shared, resource) = (Arc::clone(shared), resource.to_owned());
    tokio::spawn(async move {
        let ended = tokio::select! {
            () = end.cancelled() => Ok(()),
            ended = follow(&shared, &resource, number, client) => ended,
        };
        let outcome = ended.map_err(|status| format!("{:?}: {}", status.code(), status.message()));
        shared.note_outcome("ListAndWatch", &resource, outcome);
        stop(&shared, &resource, number);
    });
    Ok(())
}

async fn follow(
    shared: &Shared,
    resource: &str,
    number: u64,
    mut client: DevicePluginClient<Channel>,
) -> Result<(), Status> {
    let mut lists: Streaming<_> = client.list_and_watch(Empty {}).await?.into_inner();
    while let Some(list) = lists.message().await? {
        shared.change(|state| {
            let plugin = state
                .plugins
                .get_mut(resource)
                .filter(|plugin| plugin.number == number);
            if let Some(plugin) = plugin {
                plugin.devices = list.devices;
                plugin.running = true;
            }
        });
    }
    Ok(())
}

fn stop(shared: &Shared, resource: &str, number: u64) {
    shared.change(|state| {
        let plugin = state
            .plugins
            .get_mut(resource)
            .filter(|plugin| plugin.number == number);
        if let Some(plugin) = plugin {
            plugin.stopped();
        }
    });
}

/// The free devices of a plugin, and the channel for calling it.
struct Choice {
    channel: Channel,
    free: Vec<String>,
    prefers: bool,
}

fn choice(shared: &Shared, resource: &str, count: usize) -> Result<Choice, String> {
    shared.look(|state| {
        let unknown = || format!("cannot allocate unregistered device {resource}");
        let plugin = state.plugins.get(resource).ok_or_else(unknown)?;
        let shown = plugin.shown();
        if shown.healthy().is_empty() {
            return Err(format!("no healthy devices present; cannot allocate unhealthy devices {resource}"));
        }
        let held = state.allocations.iter().filter(|held| held.resource == resource);
        let taken: BTreeSet<&str> = held.flat_map(|held| held.ids.iter().map(String::as_str)).collect();
        let free: Vec<String> =
            shown.healthy().into_iter().filter(|id| !taken.contains(id)).map(str::to_owned).collect();
        if free.len() < count {
            return Err(format!(
                "requested number of devices unavailable for {resource}. Requested: {count}, Available: {}",
                free.len()
            ));
        }
        let channel =
            plugin.channel.clone().ok_or_else(|| format!("endpoint of {resource} has been stopped"))?;
        Ok(Choice { channel, free, prefers: shown.prefers })
    })
}

pub(super) async fn allocate(
    shared: &Shared,
    resource: &str,
    count: usize,
) -> Result<Allocation, String> {
    let Choice {
        channel,
        mut free,
        prefers,
    } = choice(shared, resource, count)?;
    let mut client = DevicePluginClient::new(channel);
    if prefers {
        let size = i32::try_from(count).map_err(|error| error.to_string())?;
        let wanted = ContainerPreferredAllocationRequest {
            available_device_ids: free.clone(),
            must_include_device_ids: vec![],
            allocation_size: size,
        };
        let asking = client.get_preferred_allocation(PreferredAllocationRequest {
            container_requests: vec![wanted],
        });
        let answer = shared
            .call("GetPreferredAllocation", resource, NO_DEADLINE, asking)
            .await?
            .into_inner();
        let preferred = answer
            .container_responses
            .into_iter()
            .next()
            .unwrap_or_default()
            .device_ids;
        // What is preferred and can be had comes first.
        free.sort_by_key(|id| !preferred.contains(id));
    }
    let mut ids = free;
    ids.truncate(count);
    // They are taken before their plugin is asked, and freed if it refuses.
    let number = shared.change(|state| {
        let number = state.number();
        let held = Allocation {
            number,
            resource: resource.to_owned(),
            ids: ids.clone(),
            answer: Default::default(),
        };
        state.allocations.push(held);
        number
    });
    let request = AllocateRequest {
        container_requests: vec![ContainerAllocateRequest {
            devices_ids: ids.clone(),
        }],
    };
    let answer = shared
        .call("Allocate", resource, NO_DEADLINE, client.allocate(request))
        .await;
    let answer = answer.and_then(|answer| {
        let first = answer.into_inner().container_responses.into_iter().next();
        first.ok_or_else(|| format!("no containers in the response to Allocate for {resource}"))
    });
    shared.change(|state| {
        let at = state
            .allocations
            .iter()
            .position(|held| held.number == number);
        match (answer, at) {
            (Ok(answer), Some(at)) => {
                state.allocations[at].answer = answer;
                Ok(state.allocations[at].clone())
            }
            (Ok(answer), None) => Ok(Allocation {
                number,
                resource: resource.to_owned(),
                ids,
                answer,
            }),
            (Err(why), at) => {
                at.map(|at| state.allocations.remove(at));
                Err(why)
            }
        }
    })
}
