//! The steps of a registration, as in a kubelet: dial, GetInfo, NotifyRegistrationStatus. The connection is closed afterwards: the
//! connection to the service's socket shows whether the plugin is alive.

use std::path::Path;
use std::time::Duration;

use nodedock_proto::kubelet::registration::{
    self as wire, registration_client::RegistrationClient,
};
use tonic::Status;
use tonic::transport::Channel;

use super::connection::DialError;
use super::convert::{self, PluginInfo};
use super::{clean, rpc};
use crate::grpc::{PLUGIN_DIAL, PLUGIN_INFO, PLUGIN_NOTIFY};
use nodedock_base::socket;
use nodedock_model::limit;

/// Deadline of a device plugin's options.
const DEVICE_OPTIONS_DEADLINE: Duration = Duration::from_secs(10);

/// Backoff of failed registrations: doubled from the first to the second, as in a kubelet.
const PLUGIN_RETRY_MIN: Duration = Duration::from_millis(500);
const PLUGIN_RETRY_MAX: Duration = Duration::from_secs(120);

#[derive(Debug, thiserror::Error)]
pub enum RegistrarError {
    #[error(transparent)]
    Dial(#[from] DialError),
    #[error("{step}: no answer within {} ms", deadline.as_millis())]
    Deadline {
        step: &'static str,
        deadline: Duration,
    },
    #[error("{step}: {text}")]
    Refused { step: &'static str, text: String },
}

/// Deadlines of the steps of a registration, and its backoff.
#[derive(Debug, Clone, Copy)]
pub struct PluginTimes {
    pub dial: Duration,
    pub info: Duration,
    pub notify: Duration,
    /// Deadline of a device plugin's GetDevicePluginOptions.
    pub options: Duration,
    pub retry_min: Duration,
    pub retry_max: Duration,
}

impl Default for PluginTimes {
    fn default() -> Self {
        Self {
            dial: PLUGIN_DIAL,
            info: PLUGIN_INFO,
            notify: PLUGIN_NOTIFY,
            options: DEVICE_OPTIONS_DEADLINE,
            retry_min: PLUGIN_RETRY_MIN,
            retry_max: PLUGIN_RETRY_MAX,
        }
    }
}

/// A connection to a registration socket.
pub struct Registrar {
    client: RegistrationClient<Channel>,
    times: PluginTimes,
    /// User ID of the plugin.
    uid: u32,
}

impl Registrar {
    pub async fn dial(socket: &Path, times: PluginTimes) -> Result<Self, RegistrarError> {
        let connected = tokio::time::timeout(times.dial, socket::connect_to_user(socket)).await;
        let (channel, uid) = connected
            .map_err(|_| DialError::Deadline {
                socket: socket.to_owned(),
                deadline: times.dial,
            })?
            .map_err(DialError::from)?;
        let client = RegistrationClient::new(channel)
            .max_decoding_message_size(limit::PLUGIN_INFO_BYTES_MAX);
        Ok(Self { client, times, uid })
    }

    /// User ID of the process that listens on the socket.
    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// Calls GetInfo.
    pub async fn info(&mut self) -> Result<PluginInfo, RegistrarError> {
        let request = rpc::timed(self.times.info, wire::InfoRequest {});
        let answer = within("GetInfo", self.times.info, self.client.get_info(request)).await?;
        Ok(convert::plugin_info(answer))
    }

    /// Notifies the plugin that it is registered (an error of the plugin reverts the registration), or why it is not.
    pub async fn notify(&mut self, outcome: Result<(), &str>) -> Result<(), RegistrarError> {
        let error = clean(outcome.err().unwrap_or_default());
        let status = wire::RegistrationStatus {
            plugin_registered: outcome.is_ok(),
            error,
        };
        let call = self
            .client
            .notify_registration_status(rpc::timed(self.times.notify, status));
        within("NotifyRegistrationStatus", self.times.notify, call)
            .await
            .map(drop)
    }
}

async fn within<T>(
    step: &'static str,
    deadline: Duration,
    call: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, RegistrarError> {
    match tokio::time::timeout(deadline, call).await {
        Err(_) => Err(RegistrarError::Deadline { step, deadline }),
        Ok(Err(status)) => {
            let text = format!("{:?}: {}", status.code(), clean(status.message()));
            Err(RegistrarError::Refused { step, text })
        }
        Ok(Ok(answer)) => Ok(answer.into_inner()),
    }
}
