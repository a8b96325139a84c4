//! Who may talk to a rank: mutual TLS within one job, or nothing at all, on purpose.

use crate::{
    error::{Error, Result},
    link::{Link, tcp::TcpLink, tls::TlsLink},
};
use rustix::{io::Errno, net::RecvFlags};
use rustls::{
    ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
    server::WebPkiClientVerifier,
    version::TLS13,
};
use std::{
    fmt, io,
    io::{Read, Write},
    net::{IpAddr, TcpStream},
    sync::Arc,
};

/// The name in every certificate of a job: a certificate proves membership of the job, not of a host.
pub const SERVER_NAME: &str = "deuteron.job";

/// How connections between hosts are protected.
#[derive(Clone, Debug, Default)]
pub enum Security {
    /// Nothing leaves the machine: connections are made over loopback only, and a group that would need another
    /// host is refused.
    #[default]
    Local,
    /// Everything between hosts in clear text. Each group that uses it logs a warning.
    Plain,
    /// TLS 1.3; both sides show a certificate of the job's own authority.
    Tls(Identity),
}

/// One member's certificate and key, and the authority that signs all of the job's.
#[derive(Clone)]
pub struct Identity {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    certificate: CertificateDer<'static>,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Identity(..)")
    }
}

impl Identity {
    /// From PEM texts: the authority's certificate, this member's chain, and its key.
    ///
    /// The certificate must carry the name [`SERVER_NAME`].
    pub fn from_pem(authority: &[u8], chain: &[u8], key: &[u8]) -> Result<Self> {
        let bad = |what: &str, why: &dyn fmt::Display| Error::Invalid(format!("{what}: {why}"));
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(authority) {
            let certificate = certificate.map_err(|e| bad("the authority's certificate", &e))?;
            roots.add(certificate).map_err(|e| bad("the authority's certificate", &e))?;
        }
        let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(chain)
            .collect::<Result<_, _>>()
            .map_err(|e| bad("the certificate", &e))?;
        let certificate =
            chain.first().cloned().ok_or_else(|| bad("the certificate", &"it is empty"))?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|e| bad("the private key", &e))?;
        let provider = Arc::new(ring::default_provider());
        let roots = Arc::new(roots);
        let tls = |e: rustls::Error| bad("TLS cannot use this identity", &e);
        let client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&TLS13])
            .map_err(tls)?
            .with_root_certificates(Arc::clone(&roots))
            .with_client_auth_cert(chain.clone(), key.clone_key())
            .map_err(tls)?;
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider))
            .build()
            .map_err(|e| bad("the authority's certificate", &e))?;
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(tls)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key)
            .map_err(tls)?;
        // A connection lives as long as its group: nobody resumes.
        server.send_tls13_tickets = 0;
        Ok(Self { client: Arc::new(client), server: Arc::new(server), certificate })
    }

    /// The configuration to call another member with.
    pub fn client(&self) -> Arc<ClientConfig> {
        Arc::clone(&self.client)
    }

    /// The configuration to be called by another member with.
    pub fn server(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.server)
    }

    pub(crate) fn certificate(&self) -> &[u8] {
        &self.certificate
    }
}

/// A connection whose other side has proved that it belongs to the job (or that needs no proof).
pub(crate) enum Authenticated {
    Plain(TcpStream),
    Tls(Box<Connection>, TcpStream),
}

impl Security {
    /// Whether an address may be used, and if not, what to do.
    pub(crate) fn admits(&self, address: IpAddr) -> Result<()> {
        if matches!(self, Self::Local) && !address.is_loopback() {
            return Err(Error::Bootstrap(format!(
                "{address} is not on this machine, and no identity was given: pass Security::Tls with the job's \
                 certificates, or Security::Plain if the network is trusted"
            )));
        }
        Ok(())
    }

    /// Shakes hands as the side that called. The stream's own time-outs bound the wait.
    pub(crate) fn connect(&self, stream: TcpStream) -> io::Result<Authenticated> {
        self.begin_connect(stream)?.shaken()
    }

    /// Shakes hands as the side that was called.
    pub(crate) fn accept(&self, stream: TcpStream) -> io::Result<Authenticated> {
        self.begin_accept(stream)?.shaken()
    }

    /// The side that called, before [`Authenticated::shake`].
    pub(crate) fn begin_connect(&self, stream: TcpStream) -> io::Result<Authenticated> {
        let Self::Tls(identity) = self else { return Ok(Authenticated::Plain(stream)) };
        let name = ServerName::try_from(SERVER_NAME).map_err(io::Error::other)?;
        let connection =
            ClientConnection::new(Arc::clone(&identity.client), name).map_err(io::Error::other)?;
        Ok(Authenticated::Tls(Box::new(connection.into()), stream))
    }

    /// The side that was called, before [`Authenticated::shake`].
    pub(crate) fn begin_accept(&self, stream: TcpStream) -> io::Result<Authenticated> {
        let Self::Tls(identity) = self else { return Ok(Authenticated::Plain(stream)) };
        let connection =
            ServerConnection::new(Arc::clone(&identity.server)).map_err(io::Error::other)?;
        Ok(Authenticated::Tls(Box::new(connection.into()), stream))
    }

    /// The word for it.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Local => "local TCP",
            Self::Plain => "TCP",
            Self::Tls(_) => "TLS",
        }
    }

    /// This member's certificate, for the roster; empty without TLS.
    pub(crate) fn certificate(&self) -> &[u8] {
        match self {
            Self::Local | Self::Plain => &[],
            Self::Tls(identity) => identity.certificate(),
        }
    }
}

impl Authenticated {
    /// Goes on with the handshake; `WouldBlock` where a stream that does not block has no more bytes yet.
    pub fn shake(&mut self) -> io::Result<()> {
        if let Self::Tls(connection, stream) = self {
            while connection.is_handshaking() {
                connection.complete_io(stream)?;
            }
        }
        Ok(())
    }

    fn shaken(mut self) -> io::Result<Self> {
        self.shake()?;
        Ok(self)
    }

    /// The certificate that the other side showed; empty without TLS.
    pub fn certificate(&self) -> &[u8] {
        match self {
            Self::Plain(_) => &[],
            Self::Tls(connection, _) => connection
                .peer_certificates()
                .and_then(|chain| chain.first())
                .map_or(&[], |certificate| certificate.as_ref()),
        }
    }

    pub fn socket(&self) -> &TcpStream {
        match self {
            Self::Plain(stream) | Self::Tls(_, stream) => stream,
        }
    }

    /// Whether a read would return at once: with bytes, with the end, or with an error.
    pub fn has_arrived(&mut self) -> bool {
        if let Self::Tls(connection, _) = self
            && connection
                .process_new_packets()
                .map_or(true, |state| state.plaintext_bytes_to_read() > 0)
        {
            return true;
        }
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let peeked = rustix::net::recv(self.socket(), &mut [0; 1], flags);
        !matches!(peeked, Err(Errno::AGAIN | Errno::INTR))
    }

    pub fn into_link(self) -> io::Result<Box<dyn Link>> {
        Ok(match self {
            Self::Plain(stream) => Box::new(TcpLink::new(stream)?),
            Self::Tls(connection, stream) => Box::new(TlsLink::new(*connection, stream)?),
        })
    }
}

impl Read for Authenticated {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.read(buffer),
            Self::Tls(connection, stream) => loop {
                match connection.reader().read(buffer) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        connection.complete_io(stream)?;
                    }
                    other => return other,
                }
            },
        }
    }
}

impl Write for Authenticated {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.write(buffer),
            Self::Tls(connection, _) => {
                let taken = connection.writer().write(buffer)?;
                self.flush()?;
                Ok(taken)
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        if let Self::Tls(connection, stream) = self {
            while connection.wants_write() {
                connection.write_tls(stream)?;
            }
        }
        Ok(())
    }
}
