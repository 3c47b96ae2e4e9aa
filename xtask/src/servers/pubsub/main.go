// A Pub/Sub server for tests: topics, subscriptions and schemas are those of Google's own test server; delivery is done
// here, because that one has no more than one message of a key under way, and looks for messages a hundred times a second.
//
// As in the service: what is published is leased to one stream at a time, the messages of a key to one and the same and
// in order, and what was given back or has run out is sent again together with all after it in its key. Everything is in
// memory. The administration is served over HTTP and JSON as well, since the clients of some languages use nothing else.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	pb "cloud.google.com/go/pubsub/apiv1/pubsubpb"
	"cloud.google.com/go/pubsub/pstest"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/h2c"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

func main() {
	port := flag.Int("port", 8085, "where it listens, on the loopback address alone")
	flag.Parse()
	listener, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", *port))
	if err != nil {
		log.Fatal(err)
	}
	s := &server{GServer: &pstest.NewServer().GServer, logs: map[string][]*pb.PubsubMessage{}, queues: map[string]*queue{}}
	rpc := grpc.NewServer(grpc.MaxRecvMsgSize(32 << 20))
	pb.RegisterPublisherServer(rpc, s)
	pb.RegisterSubscriberServer(rpc, s)
	pb.RegisterSchemaServiceServer(rpc, s)
	both := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ProtoMajor == 2 && strings.HasPrefix(r.Header.Get("Content-Type"), "application/grpc") {
			rpc.ServeHTTP(w, r)
		} else {
			s.admin(w, r)
		}
	})
	go s.expire()
	log.Printf("Pub/Sub listens at %s", listener.Addr())
	log.Fatal(http.Serve(listener, h2c.NewHandler(both, &http2.Server{})))
}

type server struct {
	*pstest.GServer
	mu sync.Mutex
	// What topics that retain messages have seen, for subscriptions that come later.
	logs   map[string][]*pb.PubsubMessage
	queues map[string]*queue
	last   int
}

// What a subscription has not acknowledged, in the order of publishing.
type queue struct {
	entries []*entry
	leases  int
	// Streams wait for something to happen to it.
	changed chan struct{}
}

type entry struct {
	message *pb.PubsubMessage
	// Who has it, and until when; nobody, if nil.
	stream   *stream
	ack      string
	deadline time.Time
}

type stream struct{ outstanding int }

func (q *queue) notify() {
	close(q.changed)
	q.changed = make(chan struct{})
}

// The queue of a subscription, which exists. A new one begins with what its topic retained.
func (s *server) queue(name, topic string) *queue {
	q := s.queues[name]
	if q == nil {
		q = &queue{changed: make(chan struct{})}
		for _, message := range s.logs[topic] {
			q.entries = append(q.entries, &entry{message: message})
		}
		s.queues[name] = q
	}
	return q
}

func (s *server) Publish(ctx context.Context, r *pb.PublishRequest) (*pb.PublishResponse, error) {
	topic, err := s.GetTopic(ctx, &pb.GetTopicRequest{Topic: r.Topic})
	if err != nil {
		return nil, err
	}
	for _, message := range r.Messages {
		if topic.SchemaSettings != nil && !json.Valid(message.Data) {
			return nil, status.Error(codes.InvalidArgument, "Could not parse message")
		}
	}
	found, err := s.ListTopicSubscriptions(ctx, &pb.ListTopicSubscriptionsRequest{Topic: r.Topic})
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	queues := make([]*queue, 0, len(found.Subscriptions))
	for _, name := range found.Subscriptions {
		queues = append(queues, s.queue(name, r.Topic))
	}
	answer := &pb.PublishResponse{}
	for _, message := range r.Messages {
		s.last++
		message.MessageId = fmt.Sprint(s.last)
		message.PublishTime = timestamppb.Now()
		answer.MessageIds = append(answer.MessageIds, message.MessageId)
		for _, q := range queues {
			q.entries = append(q.entries, &entry{message: message})
		}
		if topic.MessageRetentionDuration != nil {
			s.logs[r.Topic] = append(s.logs[r.Topic], message)
		}
	}
	for _, q := range queues {
		q.notify()
	}
	return answer, nil
}

func (s *server) StreamingPull(sps pb.Subscriber_StreamingPullServer) error {
	first, err := sps.Recv()
	if err != nil {
		return err
	}
	found, err := s.GetSubscription(sps.Context(), &pb.GetSubscriptionRequest{Subscription: first.Subscription})
	if err != nil {
		return err
	}
	lease := time.Duration(first.StreamAckDeadlineSeconds) * time.Second
	this := &stream{}
	go func() {
		// Signs of life, which need no answer.
		for {
			if _, err := sps.Recv(); err != nil {
				return
			}
		}
	}()
	properties := &pb.StreamingPullResponse_SubscriptionProperties{
		ExactlyOnceDeliveryEnabled: found.EnableExactlyOnceDelivery,
		MessageOrderingEnabled:     found.EnableMessageOrdering,
	}
	for {
		s.mu.Lock()
		q := s.queue(found.Name, found.Topic)
		var batch []*pb.ReceivedMessage
		if sps.Context().Err() == nil {
			batch = q.lease(this, lease, int(first.MaxOutstandingMessages), found)
		}
		changed := q.changed
		s.mu.Unlock()
		if len(batch) > 0 {
			answer := &pb.StreamingPullResponse{ReceivedMessages: batch, SubscriptionProperties: properties}
			if err := sps.Send(answer); err != nil {
				return err
			}
			continue
		}
		select {
		case <-sps.Context().Done():
			return sps.Context().Err()
		case <-changed:
		}
	}
}

// Leases to a stream what may be sent to it now.
func (q *queue) lease(to *stream, span time.Duration, window int, sub *pb.Subscription) []*pb.ReceivedMessage {
	var batch []*pb.ReceivedMessage
	others := map[string]bool{}
	for _, e := range q.entries {
		if window > 0 && to.outstanding >= window || len(batch) == 100 {
			break
		}
		key := e.message.OrderingKey
		ordered := sub.EnableMessageOrdering && key != ""
		if e.stream != nil {
			if ordered && e.stream != to {
				others[key] = true
			}
			continue
		}
		if ordered && others[key] {
			continue
		}
		q.leases++
		e.stream, e.ack, e.deadline = to, fmt.Sprintf("%s:%d", sub.Name, q.leases), time.Now().Add(span)
		to.outstanding++
		batch = append(batch, &pb.ReceivedMessage{AckId: e.ack, Message: e.message})
	}
	return batch
}

// Takes an entry from whoever has it.
func (e *entry) free() {
	if e.stream != nil {
		e.stream.outstanding--
		e.stream, e.ack = nil, ""
	}
}

// Frees the entry at a place, and with it all of its key after it.
func (q *queue) free(at int) {
	key := q.entries[at].message.OrderingKey
	q.entries[at].free()
	for _, later := range q.entries[at+1:] {
		if key != "" && later.message.OrderingKey == key {
			later.free()
		}
	}
}

func (s *server) Acknowledge(ctx context.Context, r *pb.AcknowledgeRequest) (*emptypb.Empty, error) {
	return s.settle(r.Subscription, r.AckIds, func(q *queue, done map[string]bool) {
		left := make([]*entry, 0, len(q.entries))
		for _, e := range q.entries {
			if e.stream != nil && done[e.ack] {
				e.free()
			} else {
				left = append(left, e)
			}
		}
		q.entries = left
	})
}

func (s *server) ModifyAckDeadline(ctx context.Context, r *pb.ModifyAckDeadlineRequest) (*emptypb.Empty, error) {
	return s.settle(r.Subscription, r.AckIds, func(q *queue, meant map[string]bool) {
		deadline := time.Now().Add(time.Duration(r.AckDeadlineSeconds) * time.Second)
		for at, e := range q.entries {
			switch {
			case e.stream == nil || !meant[e.ack]:
			case r.AckDeadlineSeconds == 0:
				q.free(at)
			default:
				e.deadline = deadline
			}
		}
	})
}

func (s *server) settle(name string, acks []string, change func(*queue, map[string]bool)) (*emptypb.Empty, error) {
	meant := make(map[string]bool, len(acks))
	for _, ack := range acks {
		meant[ack] = true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if q := s.queues[name]; q != nil {
		change(q, meant)
		q.notify()
	}
	return &emptypb.Empty{}, nil
}

// Ends leases that nobody extended.
func (s *server) expire() {
	for now := range time.Tick(100 * time.Millisecond) {
		s.mu.Lock()
		for _, q := range s.queues {
			ended := false
			for at, e := range q.entries {
				if e.stream != nil && now.After(e.deadline) {
					q.free(at)
					ended = true
				}
			}
			if ended {
				q.notify()
			}
		}
		s.mu.Unlock()
	}
}

func (s *server) DeleteSubscription(ctx context.Context, r *pb.DeleteSubscriptionRequest) (*emptypb.Empty, error) {
	s.mu.Lock()
	delete(s.queues, r.Subscription)
	s.mu.Unlock()
	return s.GServer.DeleteSubscription(ctx, r)
}

// What is retained is there from the beginning, so there is nowhere to go back to.
func (s *server) Seek(context.Context, *pb.SeekRequest) (*pb.SeekResponse, error) {
	return &pb.SeekResponse{}, nil
}

// The administration over HTTP: a name is the path, what is done to it the method.
func (s *server) admin(w http.ResponseWriter, r *http.Request) {
	name := strings.TrimPrefix(r.URL.Path, "/v1/")
	answer, err := s.administer(r, name)
	if err != nil {
		said := status.Convert(err)
		code := map[codes.Code]int{codes.NotFound: 404, codes.AlreadyExists: 409, codes.InvalidArgument: 400}[said.Code()]
		if code == 0 {
			code = 500
		}
		names := map[int]string{404: "NOT_FOUND", 409: "ALREADY_EXISTS", 400: "INVALID_ARGUMENT", 500: "UNKNOWN"}
		body := map[string]any{"error": map[string]any{"code": code, "message": said.Message(), "status": names[code]}}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		_ = json.NewEncoder(w).Encode(body)
		return
	}
	body, _ := protojson.Marshal(answer)
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(body)
}

func (s *server) administer(r *http.Request, name string) (proto.Message, error) {
	read := func(into proto.Message) error {
		body, err := io.ReadAll(r.Body)
		if err == nil && len(body) > 0 {
			err = protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(body, into)
		}
		if err != nil {
			return status.Error(codes.InvalidArgument, err.Error())
		}
		return nil
	}
	ctx := r.Context()
	parts := strings.Split(name, "/")
	kind := ""
	if len(parts) >= 3 {
		kind, _, _ = strings.Cut(parts[2], ":")
	}
	switch r.Method + " " + kind {
	case "PUT topics":
		topic := &pb.Topic{}
		if err := read(topic); err != nil {
			return nil, err
		}
		topic.Name = name
		return s.CreateTopic(ctx, topic)
	case "GET topics":
		return s.GetTopic(ctx, &pb.GetTopicRequest{Topic: name})
	case "DELETE topics":
		return s.DeleteTopic(ctx, &pb.DeleteTopicRequest{Topic: name})
	case "PUT subscriptions":
		sub := &pb.Subscription{}
		if err := read(sub); err != nil {
			return nil, err
		}
		sub.Name = name
		return s.CreateSubscription(ctx, sub)
	case "GET subscriptions":
		return s.GetSubscription(ctx, &pb.GetSubscriptionRequest{Subscription: name})
	case "DELETE subscriptions":
		return s.DeleteSubscription(ctx, &pb.DeleteSubscriptionRequest{Subscription: name})
	case "POST subscriptions":
		return s.Seek(ctx, nil)
	case "POST schemas":
		schema := &pb.Schema{}
		if err := read(schema); err != nil {
			return nil, err
		}
		project := strings.Join(parts[:2], "/")
		request := &pb.CreateSchemaRequest{Parent: project, Schema: schema, SchemaId: r.URL.Query().Get("schemaId")}
		return s.CreateSchema(ctx, request)
	}
	return nil, status.Errorf(codes.NotFound, "nothing answers %s %s", r.Method, r.URL.Path)
}
