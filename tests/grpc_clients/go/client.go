// The official client for Go: makes the call that its first argument describes as JSON and prints what it saw as JSON
// (tests/grpc_clients/call.py has both).
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"io/ioutil"
	"os"
	"sort"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	health "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	reflection "google.golang.org/grpc/reflection/grpc_reflection_v1alpha"
	"google.golang.org/grpc/status"

	inference "athanor/inference/v1"
)

type call struct {
	Address         string
	Do              string
	Key             *string
	Ca              *string
	Certificate     *string
	PrivateKey      *string `json:"private_key"`
	Model           string
	Text            string
	TextBytes       int     `json:"text_bytes"`
	MaxOutputTokens uint32  `json:"max_output_tokens"`
	IgnoreEos       bool    `json:"ignore_eos"`
	Temperature     float64
	TimeoutS        float64 `json:"timeout_s"`
	CancelAfter     int     `json:"cancel_after"`
	Service         string
}

type answer map[string]interface{}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func secure(asked call) grpc.DialOption {
	if asked.Ca == nil {
		return grpc.WithInsecure()
	}
	pem, err := ioutil.ReadFile(*asked.Ca)
	must(err)
	config := &tls.Config{RootCAs: x509.NewCertPool()}
	config.RootCAs.AppendCertsFromPEM(pem)
	if asked.Certificate != nil {
		pair, err := tls.LoadX509KeyPair(*asked.Certificate, *asked.PrivateKey)
		must(err)
		config.Certificates = []tls.Certificate{pair}
	}
	return grpc.WithTransportCredentials(credentials.NewTLS(config))
}

// codeName gives the status's name as the protocol spells it: the package's own is NotFound.
func codeName(code codes.Code) string {
	names := []string{"OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND",
		"ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE",
		"UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"}
	return names[code]
}

func (seen answer) failed(err error) {
	found := status.Convert(err)
	seen["code"], seen["message"] = codeName(found.Code()), found.Message()
	for _, detail := range found.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			seen["reason"], seen["domain"] = detail.Reason, detail.Domain
		case *errdetails.RequestInfo:
			seen["error_request_id"] = detail.RequestId
		case *errdetails.ResourceInfo:
			seen["resource"] = detail.ResourceName
		case *errdetails.BadRequest:
			fields := []string{}
			for _, one := range detail.FieldViolations {
				fields = append(fields, one.Field)
			}
			seen["violations"] = fields
		case *errdetails.QuotaFailure:
			quota := []string{}
			for _, one := range detail.Violations {
				quota = append(quota, one.Description)
			}
			seen["quota"] = quota
		}
	}
}

func kind(event *inference.GenerateResponse) string {
	switch event.Event.(type) {
	case *inference.GenerateResponse_Started:
		return "started"
	case *inference.GenerateResponse_Delta:
		return "delta"
	case *inference.GenerateResponse_Finished:
		return "finished"
	}
	return "other"
}

func (seen answer) generate(ctx context.Context, cancel func(), channel *grpc.ClientConn, asked call) error {
	text := asked.Text
	if asked.TextBytes > 0 {
		text = strings.Repeat("x", asked.TextBytes)
	}
	stream, err := inference.NewInferenceServiceClient(channel).Generate(ctx, &inference.GenerateRequest{
		Model:           asked.Model,
		Input:           &inference.GenerateRequest_Text{Text: text},
		MaxOutputTokens: &asked.MaxOutputTokens,
		IgnoreEos:       &asked.IgnoreEos,
		Sampling:        &inference.Sampling{Temperature: &asked.Temperature},
	})
	if err != nil {
		return err
	}
	events, deltas, said := []string{}, 0, ""
	for {
		event, err := stream.Recv()
		seen["events"], seen["deltas"], seen["text"] = events, deltas, said
		if err == io.EOF {
			break
		} else if err != nil {
			return err
		}
		if len(events) == 0 || events[len(events)-1] != kind(event) {
			events = append(events, kind(event))
		}
		if kind(event) == "finished" {
			seen["output_tokens"] = event.GetFinished().Usage.OutputTokens
		}
		if kind(event) == "delta" {
			said += event.GetDelta().Text
			if deltas++; deltas == asked.CancelAfter {
				cancel()
			}
		}
	}
	initial, err := stream.Header()
	if err == nil {
		seen["request_id"] = initial.Get("x-request-id")[0]
	}
	return err
}

func (seen answer) reflect(ctx context.Context, channel *grpc.ClientConn) error {
	stream, err := reflection.NewServerReflectionClient(channel).ServerReflectionInfo(ctx)
	if err != nil {
		return err
	}
	listing := &reflection.ServerReflectionRequest_ListServices{}
	if err := stream.Send(&reflection.ServerReflectionRequest{MessageRequest: listing}); err != nil && err != io.EOF {
		return err
	}
	got, err := stream.Recv()
	if err != nil {
		return err
	}
	names := []string{}
	for _, one := range got.GetListServicesResponse().Service {
		names = append(names, one.Name)
	}
	sort.Strings(names)
	seen["services"] = names
	return stream.CloseSend()
}

func (seen answer) perform(ctx context.Context, cancel func(), channel *grpc.ClientConn, asked call) error {
	check := &health.HealthCheckRequest{Service: asked.Service}
	switch asked.Do {
	case "models":
		got, err := inference.NewInferenceServiceClient(channel).ListModels(ctx, &inference.ListModelsRequest{})
		if err != nil {
			return err
		}
		names := []string{}
		for _, one := range got.Models {
			names = append(names, one.Name)
		}
		seen["models"] = names
	case "check":
		got, err := health.NewHealthClient(channel).Check(ctx, check)
		if err != nil {
			return err
		}
		seen["status"] = got.Status.String()
	case "watch":
		stream, err := health.NewHealthClient(channel).Watch(ctx, check)
		if err != nil {
			return err
		}
		got, err := stream.Recv()
		if err != nil {
			return err
		}
		seen["status"] = got.Status.String()
	case "reflect":
		return seen.reflect(ctx, channel)
	case "generate":
		return seen.generate(ctx, cancel, channel, asked)
	}
	return nil
}

func main() {
	var asked call
	must(json.Unmarshal([]byte(os.Args[1]), &asked))
	channel, err := grpc.Dial(asked.Address, secure(asked))
	must(err)
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(asked.TimeoutS*float64(time.Second)))
	defer cancel()
	if asked.Key != nil {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+*asked.Key)
	}
	seen := answer{}
	if err := seen.perform(ctx, cancel, channel, asked); err != nil {
		seen.failed(err)
	}
	must(json.NewEncoder(os.Stdout).Encode(seen))
}
