//! A device plugin as a `DeviceDriver`: one connection, from its start to its end. The device manager decides whether there is
//! another.

use std::future::Future;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::{FutureExt, StreamExt};
use nodedock_proto::kubelet::device_plugin::v1beta1 as wire;
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;
use tonic::transport::Channel;
use tonic::{Request, Response, Status, Streaming};

use super::connection::dial;
use super::{clean, convert, problem};
use nodedock_base::error::chain;
use nodedock_base::tasks::Tasks;
use nodedock_core::driver::{Call, DeviceDriver, DeviceLists, DeviceOptions};
use nodedock_model::{ContainerAllocation, ExtendedResource, PluginDevice, Problem, limit};

type Client = wire::device_plugin_client::DevicePluginClient<Channel>;

/// Deadlines of the steps.
#[derive(Debug, Clone, Copy)]
pub struct PluginSteps {
    pub dial: Duration,
    pub options: Duration,
}

impl Default for PluginSteps {
    fn default() -> Self {
        Self { dial: limit::PLUGIN_DIAL, options: limit::DEVICE_OPTIONS_DEADLINE }
    }
}

/// A plugin's stream of lists.
pub struct Following {
    pub lists: DeviceLists,
    /// Why the stream ended, after the last list. An error means that the tasks stopped.
    pub end: oneshot::Receiver<Problem>,
}

/// A device plugin on one connection. Its calls fail when the connection is lost.
pub struct DevicePlugin {
    resource: ExtendedResource,
    client: Client,
    options: DeviceOptions,
    tasks: Tasks,
}

impl DevicePlugin {
    /// Connects, and calls the plugin for its options. Streams end with the tasks.
    pub async fn connect(
        resource: ExtendedResource,
        socket: &Path,
        steps: PluginSteps,
        tasks: &Tasks,
    ) -> Result<Self, Problem> {
        let dialled = dial(socket, steps.dial).await;
        let (channel, _ended) = dialled.map_err(|error| not_reached(&resource, &chain(&error)))?;
        let client = Client::new(channel).max_decoding_message_size(limit::PLUGIN_ANSWER_BYTES_MAX);
        let mut plugin = Self { resource, client, options: DeviceOptions::default(), tasks: tasks.clone() };
        let call = Call { request_id: nodedock_base::request::new_id(), deadline: steps.options };
        let mut client = plugin.client.clone();
        let asked = client.get_device_plugin_options(request(&call, wire::Empty {}));
        plugin.options = convert::device_plugin::options(plugin.within(&call, asked).await?);
        Ok(plugin)
    }

    /// Opens a stream of lists.
    pub fn follow(&self, request_id: Arc<str>) -> Following {
        let (sender, lists) = watch::channel(None);
        let (ended, end) = oneshot::channel();
        let (client, resource, stopped) = (self.client.clone(), self.resource.clone(), self.tasks.stopped());
        self.tasks.spawn("device-lists", async move {
            tokio::select! {
                // Safe to drop: the next start opens the list again.
                () = stopped => {}
                // The receiver is gone.
                () = sender.closed() => {}
                problem = read(client, &resource, &request_id, &sender) => {
                    // A watcher may use only the lists.
                    let _ = ended.send(problem);
                }
            }
        });
        Following { lists, end }
    }

    async fn within<T>(
        &self,
        call: &Call,
        work: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, Problem> {
        match tokio::time::timeout(call.deadline, work).await {
            Err(_) => Err(problem::no_answer(&self.resource, call.deadline)),
            // The call has the deadline, and either side may end it first.
            Ok(Err(status)) if problem::is_late(&status) => {
                Err(problem::no_answer(&self.resource, call.deadline))
            }
            Ok(Err(status)) => Err(problem::of_status(&self.resource, &status)),
            Ok(Ok(answer)) => Ok(answer.into_inner()),
        }
    }

    fn not_valid(&self, why: &str) -> Problem {
        problem::not_valid(&self.resource, why)
    }
}

#[async_trait]
impl DeviceDriver for DevicePlugin {
    fn options(&self) -> DeviceOptions {
        self.options
    }

    /// Returns at once: plugins in Go send no headers before their first list.
    async fn list_and_watch(&self, call: &Call) -> Result<DeviceLists, Problem> {
        Ok(self.follow(call.request_id.clone()).lists)
    }

    async fn allocate(&self, call: &Call, device_ids: &[String]) -> Result<ContainerAllocation, Problem> {
        let message = convert::device_plugin::allocate_request(device_ids);
        let mut client = self.client.clone();
        let answer = self.within(call, client.allocate(request(call, message))).await?;
        convert::device_plugin::allocation(answer).map_err(|why| self.not_valid(&why))
    }

    async fn preferred_allocation(
        &self,
        call: &Call,
        available: &[String],
        must_include: &[String],
        size: u32,
    ) -> Result<Vec<String>, Problem> {
        let message = convert::device_plugin::preferred_request(available, must_include, size);
        let mut client = self.client.clone();
        let answer = self.within(call, client.get_preferred_allocation(request(call, message))).await?;
        convert::device_plugin::preferred(answer).map_err(|why| self.not_valid(&why))
    }

    async fn pre_start(&self, call: &Call, device_ids: &[String]) -> Result<(), Problem> {
        let deadline = call.deadline.min(limit::PRE_START);
        let call = Call { request_id: call.request_id.clone(), deadline };
        let message = wire::PreStartContainerRequest { devices_ids: device_ids.to_vec() };
        let mut client = self.client.clone();
        self.within(&call, client.pre_start_container(request(&call, message))).await.map(drop)
    }
}

/// Passes the deadline in the call, so that the plugin can stop in time.
fn request<T>(call: &Call, message: T) -> Request<T> {
    let mut request = named(&call.request_id, message);
    request.set_timeout(call.deadline);
    request
}

fn named<T>(request_id: &str, message: T) -> Request<T> {
    let mut request = Request::new(message);
    // The request id comes from the node API, which accepts only plain characters.
    if let Ok(id) = request_id.parse() {
        request.metadata_mut().insert("x-request-id", id);
    }
    request
}

/// Reads a stream to its end and returns the reason.
async fn read(
    mut client: Client,
    resource: &ExtendedResource,
    request_id: &str,
    lists: &watch::Sender<Option<Arc<[PluginDevice]>>>,
) -> Problem {
    let mut stream = match client.list_and_watch(named(request_id, wire::Empty {})).await {
        Ok(answer) => answer.into_inner(),
        Err(status) => return problem::of_status(resource, &status),
    };
    loop {
        let (newest, end) = newest(&mut stream).await;
        if let Some(list) = newest {
            match convert::device_plugin::listed(list) {
                Ok(listed) => lists.send_replace(Some(listed)),
                Err(why) => return problem::not_valid(resource, &why),
            };
        }
        match end {
            None => tokio::time::sleep(limit::LIST_PACE).await,
            Some(Ok(())) => return ended(resource),
            Some(Err(status)) => return problem::of_status(resource, &status),
        }
    }
}

/// Waits for a list and skips received lists before the newest. Also returns whether the stream has ended.
async fn newest(
    stream: &mut Streaming<wire::ListAndWatchResponse>,
) -> (Option<wire::ListAndWatchResponse>, Option<Result<(), Status>>) {
    let mut newest = None;
    let mut next = stream.next().await;
    // Otherwise a plugin that lists faster than it is read would never be reported.
    let until = Instant::now() + limit::LIST_PACE;
    loop {
        match next {
            None => return (newest, Some(Ok(()))),
            Some(Err(status)) => return (newest, Some(Err(status))),
            Some(Ok(list)) => newest = Some(list),
        }
        if Instant::now() >= until {
            return (newest, None);
        }
        match stream.next().now_or_never() {
            Some(after) => next = after,
            None => return (newest, None),
        }
    }
}

fn not_reached(resource: &ExtendedResource, why: &str) -> Problem {
    Problem::unavailable("driver-not-connected", clean(&format!("device plugin {resource}: {why}")))
}

fn ended(resource: &ExtendedResource) -> Problem {
    let message = format!("device plugin {resource} ended its list of devices");
    Problem::unavailable("driver-unavailable", message)
}

#[cfg(test)]
mod tests;
